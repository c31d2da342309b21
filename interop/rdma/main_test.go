package rdma

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
)

const (
	// kernelKey is the environment variable with the release of Debian's kernel that the tests run on, 6.12 by default.
	kernelKey = "FARED_VM_KERNEL"
	// folderKey is set in the virtual machine, to the folder of the binaries.
	folderKey = "FARED_RDMA_FOLDER"
)

var folder = os.Getenv(folderKey)

func TestMain(m *testing.M) {
	if folder != "" || !gate.Runs(gate.VM) {
		os.Exit(m.Run())
	}
	if err := runInVM(cmp.Or(os.Getenv(kernelKey), "6.12")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
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
	program, _, err := binary.Paths()
	if err != nil {
		return err
	}
	for _, command := range [][]string{
		{"cp", program, filepath.Join(dir, "fared")},
		{"go", "test", "-c", "-o", filepath.Join(dir, "tests"), "."},
		{"make", "-C", "../../lib", "OUT=" + dir},
		{"make", "-C", "../../lib/softdev", "OUT=" + dir},
		{"make", "-C", "../../lib/nccl", "OUT=" + dir},
		{"cc", "-O2", "-Wall", "-Werror", "-o", filepath.Join(dir, "target"), "testdata/target.c", "-libverbs"},
	} {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", command, err, out)
		}
	}
	var flags []string
	pattern, skip := ".", "^$"
	flag.Visit(func(f *flag.Flag) {
		switch f.Name { // those that select tests and show them; others name files of this machine
		case "test.run":
			pattern = f.Value.String()
		case "test.skip":
			skip = f.Value.String()
		case "test.v", "test.timeout", "test.failfast", "test.bench", "test.benchtime":
			flags = append(flags, "-"+f.Name+"="+f.Value.String())
		}
	})
	// Ctrl-C reaches the script as well, which ends the machine; wait for it.
	signal.Ignore(os.Interrupt)
	machine := func(options, environment []string, more ...string) *exec.Cmd {
		line := append([]string{"-k", kernel, "-t", "1500", "-d", "rdma_rxe", "-d", "rdma_ucm", "-d", "ib_uverbs"}, options...)
		line = append(append(append(line, "env", folderKey+"="+dir, gate.Environment+"="+string(gate.VM)), environment...), filepath.Join(dir, "tests"))
		cmd := exec.Command("../../scripts/kernel-vm", slices.Concat(line, flags, more)...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		return cmd
	}
	const machines = "TestMachines"
	// Which tests the flags select is for package testing to say.
	list := exec.Command(filepath.Join(dir, "tests"), "-test.list="+pattern)
	list.Env = append(os.Environ(), folderKey+"="+dir)
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("%v: %w", list.Args, err)
	}
	skipped, err := regexp.MatchString(skip, machines)
	if err != nil {
		return fmt.Errorf("-skip: %w", err)
	}
	names := strings.Fields(string(out))
	two := !skipped && slices.Contains(names, machines)
	var errs []error
	if !two || len(names) > 1 {
		errs = append(errs, machine(nil, nil, "-test.run="+pattern, "-test.skip="+skip+"|^"+machines+"$").Run())
	}
	if two {
		errs = append(errs, runTwo(dir, machine, machines))
	}
	return errors.Join(errs...)
}

// runTwo runs a test in two machines at once, whose devices are connected.
func runTwo(dir string, machine func(options, environment []string, more ...string) *exec.Cmd, test string) error {
	var running [2]*exec.Cmd
	var logs [2]bytes.Buffer
	for i := range running {
		var cables []string
		for p := range planes + 1 {
			cables = append(cables, "-l", fmt.Sprintf("%s:%d", filepath.Join(dir, fmt.Sprint("cable-", p)), i))
		}
		running[i] = machine(cables, []string{fmt.Sprintf("%s=%d", machineKey, i+1)}, "-test.run=^"+test+"$")
		running[i].Stdout, running[i].Stderr = &logs[i], &logs[i]
		if err := running[i].Start(); err != nil {
			return err
		}
	}
	var errs []error
	for i, cmd := range running {
		err := cmd.Wait()
		fmt.Printf("machine %d:\n%s", i+1, logs[i].String())
		if err != nil {
			errs = append(errs, fmt.Errorf("machine %d: %w", i+1, err))
		}
	}
	return errors.Join(errs...)
}
