package systemd

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	// kernelKey is the environment variable with the release of Debian's kernel, such as 6.12, that the tests run on, in a virtual machine.
	kernelKey = "FARED_VM_KERNEL"
	// insideKey is set to the same in the virtual machine.
	insideKey = "FARED_VM_INSIDE"

	// vmFolder has the package, the examples and the binary in the virtual machine.
	vmFolder = "/opt/fared"
	vmBinary = vmFolder + "/fared"

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
	code := 1
	switch kernel := os.Getenv(kernelKey); {
	case inVM != "":
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
			break
		}
		fmt.Println("kernel", release.String())
		code = m.Run()
	case kernel != "":
		if err := runInVM(kernel); err != nil {
			fmt.Fprintln(os.Stderr, err)
			break
		}
		code = 0
	default:
		code = m.Run()
		if programFolder != "" {
			os.RemoveAll(programFolder)
		}
	}
	os.Exit(code)
}

// runInVM runs the tests that the flags select in a virtual machine with the file system of the containers' image, whose process 1 is systemd.
func runInVM(kernel string) error {
	flag.Parse()
	root, err := os.MkdirTemp("", "fared-vm-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(root)
	if out, err := exec.Command("sh", "-c", `c=$(docker create "$1" /bin/true) && { docker export "$c" | tar -C "$2" --numeric-owner -x; status=$?; docker rm "$c"; exit $status; }`, "sh", image(), root).CombinedOutput(); err != nil {
		return fmt.Errorf("the image %s cannot be exported, 'make images' makes it: %w\n%s", image(), err, out)
	}
	// The folder is the root of users other than root as well.
	if err := os.Chmod(root, 0o755); err != nil {
		return err
	}
	for _, file := range []string{
		".dockerenv", // by which systemd believes that it is in a container
		"etc/systemd/system/multi-user.target.wants/bird.service", // no test needs it, and a start takes seconds of an emulated processor
	} {
		if err := os.Remove(filepath.Join(root, file)); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	here := filepath.Join(root, vmFolder, "systemd")
	if err := os.MkdirAll(here, 0o755); err != nil {
		return err
	}
	for file, target := range map[string]string{".": here, "../examples": filepath.Join(root, vmFolder, "examples")} {
		if err := os.CopyFS(target, os.DirFS(file)); err != nil {
			return err
		}
	}
	if err := build(filepath.Join(root, vmBinary), "build", "../cmd/fared"); err != nil {
		return err
	}
	if err := build(filepath.Join(here, "tests"), "test", "-c", "."); err != nil {
		return err
	}
	line := []string{"-s", "-k", kernel, "-r", root, "-t", "900", "env", "-C", filepath.Join(vmFolder, "systemd"), insideKey + "=" + kernel, "./tests"}
	flag.Visit(func(f *flag.Flag) {
		switch f.Name { // those that select tests and show them; others name files of this machine
		case "test.run", "test.skip", "test.v", "test.timeout", "test.count", "test.failfast", "test.list":
			line = append(line, "-"+f.Name+"="+f.Value.String())
		}
	})
	cmd := exec.Command("../scripts/kernel-vm", line...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// Ctrl-C reaches the script as well, which ends the machine; wait for it.
	signal.Ignore(os.Interrupt)
	return cmd.Run()
}
