package rdma

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"testing"
)

const (
	// kernelKey is the environment variable with the release of Debian's kernel that the tests run on. Without it there is nothing to test.
	kernelKey = "FARED_VM_KERNEL"
	// folderKey is set in the virtual machine, to the folder of the binaries.
	folderKey = "FARED_RDMA_FOLDER"
)

var folder = os.Getenv(folderKey)

func TestMain(m *testing.M) {
	switch kernel := os.Getenv(kernelKey); {
	case folder != "":
		os.Exit(m.Run())
	case kernel != "":
		if err := runInVM(kernel); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	default:
		fmt.Println("make vm runs these tests, which need rdma_rxe")
	}
}

// runInVM runs the tests that the flags select in a virtual machine with the file system of this one.
func runInVM(kernel string) error {
	flag.Parse()
	dir, err := os.MkdirTemp("", "fared-rdma-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, command := range [][]string{
		{"go", "build", "-o", filepath.Join(dir, "fared"), "../../cmd/fared"},
		{"go", "test", "-c", "-o", filepath.Join(dir, "tests"), "."},
		{"make", "-C", "../../lib", "OUT=" + dir},
		{"make", "-C", "../../lib/softdev", "OUT=" + dir},
		{"make", "-C", "../../lib/nccl", "OUT=" + dir},
	} {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", command, err, out)
		}
	}
	line := []string{"-k", kernel, "-t", "1500", "-d", "rdma_rxe", "-d", "rdma_ucm", "-d", "ib_uverbs", "env", folderKey + "=" + dir, filepath.Join(dir, "tests")}
	flag.Visit(func(f *flag.Flag) {
		switch f.Name { // those that select tests and show them; others name files of this machine
		case "test.run", "test.skip", "test.v", "test.timeout", "test.failfast", "test.bench", "test.benchtime":
			line = append(line, "-"+f.Name+"="+f.Value.String())
		}
	})
	cmd := exec.Command("../../scripts/kernel-vm", line...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// Ctrl-C reaches the script as well, which ends the machine; wait for it.
	signal.Ignore(os.Interrupt)
	return cmd.Run()
}
