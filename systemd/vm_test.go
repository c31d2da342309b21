package systemd

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
)

const (
	// kernelsKey is the environment variable with the releases of Debian's kernel of TestVM, separated by spaces.
	kernelsKey = "FARED_VM_KERNELS"
	// insideKey is set in the virtual machine, to the release of its kernel.
	insideKey = "FARED_VM_INSIDE"

	// vmFolder has the package, the examples and the binary in the virtual machine.
	vmFolder = "/opt/fared"
	vmBinary = vmFolder + "/fared"
	vmLab    = vmFolder + "/fared-lab"

	// emulation is how much longer everything may take on an emulated processor.
	emulation = 5
)

// inVM is the release of the kernel if the test runs in a virtual machine, else empty.
var inVM = os.Getenv(insideKey)

// patience returns a time limit, which is longer on an emulated processor.
func patience(limit time.Duration) time.Duration {
	if inVM != "" {
		return emulation * limit
	}
	return limit
}

func TestMain(m *testing.M) {
	if inVM != "" {
		var name syscall.Utsname
		err := syscall.Uname(&name)
		var release strings.Builder
		for _, c := range name.Release {
			if c != 0 {
				release.WriteByte(byte(c))
			}
		}
		if err != nil || !strings.HasPrefix(release.String(), inVM+".") {
			fmt.Fprintf(os.Stderr, "the kernel is %s, want %s: %v\n", release.String(), inVM, err)
			os.Exit(1)
		}
		fmt.Println("kernel", release.String())
	}
	os.Exit(m.Run())
}

// TestVM plays a first day on each of Debian's kernels, in a virtual machine.
func TestVM(t *testing.T) {
	gate.Slow(t, gate.VM, "boots a machine for each kernel")
	for _, kernel := range strings.Fields(cmp.Or(os.Getenv(kernelsKey), "6.12 6.1")) {
		t.Run(kernel, func(t *testing.T) {
			if out, err := runInVM(kernel, "^TestMonday$"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			} else {
				t.Logf("%s", out)
			}
		})
	}
}

// runInVM runs the tests that a pattern selects in a virtual machine with the file system of the containers' image,
// whose process 1 is systemd, and returns their output.
func runInVM(kernel, pattern string) ([]byte, error) {
	root, err := os.MkdirTemp("", "fared-vm-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(root)
	if out, err := exec.Command("sh", "-c", `c=$(docker create "$1" /bin/true) && { docker export "$c" | tar -C "$2" --numeric-owner -x; status=$?; docker rm "$c"; exit $status; }`, "sh", image(), root).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("the image %s cannot be exported, 'make images' makes it: %w\n%s", image(), err, out)
	}
	// The folder is the root of users other than root as well.
	if err := os.Chmod(root, 0o755); err != nil {
		return nil, err
	}
	for _, file := range []string{
		".dockerenv", // by which systemd believes that it is in a container
		"etc/systemd/system/multi-user.target.wants/bird.service", // no test needs it, and a start takes seconds of an emulated processor
	} {
		if err := os.Remove(filepath.Join(root, file)); err != nil && !os.IsNotExist(err) {
			return nil, err
		}
	}
	here := filepath.Join(root, vmFolder, "systemd")
	if err := os.MkdirAll(here, 0o755); err != nil {
		return nil, err
	}
	for file, target := range map[string]string{".": here, "../examples": filepath.Join(root, vmFolder, "examples")} {
		if err := os.CopyFS(target, os.DirFS(file)); err != nil {
			return nil, err
		}
	}
	program, lab, err := binary.Paths()
	if err != nil {
		return nil, err
	}
	// The flags of the binary under test, so that a package that was compiled for it is not compiled again.
	build := exec.Command("sh", "-c", `cp "$1" "$2" "$3" && CGO_ENABLED=0 go test -c -trimpath -tags grpcnotrace -o "$4" .`, "sh", program, lab, filepath.Join(root, vmFolder), filepath.Join(here, "tests"))
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%v: %w\n%s", build, err, out)
	}
	out, err := exec.Command("../scripts/kernel-vm", "-s", "-k", kernel, "-r", root, "-t", "900", "env", "-C", filepath.Join(vmFolder, "systemd"), insideKey+"="+kernel,
		gate.Environment+"="+string(gate.Systemd), "./tests", "-test.run="+pattern, "-test.v").CombinedOutput()
	if err == nil && !strings.Contains(string(out), "--- PASS: ") {
		err = errors.New("no test has passed")
	}
	return out, err
}
