package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/transport/tcpslots"
)

// Exit codes of `fared exec`, those of env(1), nohup(1) and timeout(1): the others belong to the program.
const (
	exitExec      = 125 // the program was not started
	exitNotRun    = 126 // the program exists, but cannot be run
	exitNoProgram = 127
	exitSignal    = 128 // plus the number of the signal that ended the program
)

// execOptions are the flags and arguments of `fared exec`.
type execOptions struct {
	file, cgroup string
	report       bool
	command      []string
}

func execCommand(e *cli.Env) *cobra.Command {
	o := &execOptions{}
	c := &cobra.Command{
		Use: "exec [flags] -- PROGRAM [ARGUMENT ...]", Short: "Run a program whose TCP connections take the planes by weight",
		Long: `Runs PROGRAM in a new cgroup. Each TCP connection that it, or a process it starts, opens to a
loopback of the slot table gets the source address and source port of a slot, so that the data
plane (driver bpf) steers the connection to the slot's plane. Connections are dealt to sub-ports
by their weights, exactly over time; parked slots get none. The weights are those of the slot
table at any time. Open connections stay with their slots, and the data plane carries them over
the other planes while their plane is down. PROGRAM is not modified: PyTorch with Gloo, MPI and
NCCL's sockets need no support for it (/usr/share/doc/fared/tcp.md).

A connection is left unchanged if the program has chosen its source port or its device, if the
destination has no slots, or if the destination's port already has connections from all slots of
the plane in turn. --report shows the numbers at the end.

The data plane steers destination ports of dataplane.tcp_ports and dataplane.tcp_port_range.
Without steering (driver linux) exec ends with an error, because connections would take other planes.

It needs root, or CAP_BPF, CAP_NET_ADMIN and write access to the cgroup. To run PROGRAM as
another user put setpriv before it. --cgroup PATH uses an existing cgroup, such as that of a
container or of a job of Slurm. Without PROGRAM it then places the connections of that cgroup
until SIGTERM or Ctrl-C, and PROGRAM needs no privileges.

The exit code is that of PROGRAM, or 128 plus the number of the signal that ended it. 125: fared
could not run it; 126: PROGRAM cannot be run; 127: it was not found. Signals are passed on.`,
		Example: `  sudo fared exec -- iperf3 -c 10.255.0.2 -p 4793 -P 16
  sudo fared exec --report -- torchrun --nnodes 4 --nproc-per-node 8 train.py
  mpirun -np 16 sudo fared exec -- setpriv --reuid me --regid me --init-groups ./solver
  sudo fared exec --cgroup /sys/fs/cgroup/system.slice/job.service`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 && o.cgroup == "" {
				return cli.Usage(errors.New("exec needs a program, or --cgroup"), "for example: fared exec -- iperf3 -c 10.255.0.2 -p 4793")
			}
			o.command = args
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return runExec(c.Context(), e, o) },
	}
	slotTableFlag(c, &o.file)
	c.Flags().StringVar(&o.cgroup, "cgroup", "", "use this existing cgroup (a directory of cgroup version 2) instead of a new one")
	c.Flags().BoolVar(&o.report, "report", false, "write the number of connections of each plane to standard error at the end")
	c.Flags().SetInterspersed(false) // flags after PROGRAM are the program's
	_ = c.MarkFlagDirname("cgroup")
	return c
}

func runExec(ctx context.Context, e *cli.Env, o *execOptions) (err error) {
	path := ""
	if len(o.command) > 0 {
		if path, err = findProgram(o.command[0]); err != nil {
			return err
		}
	}
	table, err := openSlots(o.file, "")
	if err != nil {
		var coded *cli.Error
		if errors.As(err, &coded) {
			coded.Code = exitExec
		}
		return err
	}
	defer table.Close()
	if err := steersTCP(table); err != nil {
		return err
	}
	dir, remove, err := o.cgroupDir()
	if err != nil {
		return err
	}
	defer func() {
		if failed := remove(); failed != nil {
			fmt.Fprintf(e.Err, "fared exec: processes of the program are still running, without new slots: %v\n", failed)
		}
	}()
	placer, err := tcpslots.Attach(dir, table)
	if err != nil {
		return explainAttach(err)
	}
	defer placer.Close()
	stop := followTable(e, placer)
	if path == "" {
		<-ctx.Done()
	} else {
		err = runProgram(dir, path, o.command)
	}
	stop()
	if o.report {
		if failed := report(e.Err, table, placer); failed != nil {
			return cli.Exit(exitExec, failed, "")
		}
	}
	return err
}

// steersTCP returns an error if connections would not take the planes of their slots. Tables that name no services do
// not show it.
func steersTCP(table *slots.Table) error {
	if len(table.Services()) == 0 || slices.ContainsFunc(table.Steered(), func(r slots.ServiceRange) bool { return r.Protocol == unix.IPPROTO_TCP }) {
		return nil
	}
	return cli.Exit(exitExec, errors.New("the data plane does not steer TCP connections by their source ports, so that they would take other planes than those of their slots"),
		"use driver bpf ('fared dataplane show' has the driver in use, and its log the reason), and set dataplane.tcp_port_range to the ports of the program's listeners")
}

// followTable keeps the placer current until stop is called.
func followTable(e *cli.Env, placer *tcpslots.Placer) (stop func()) {
	log := cli.NewLogger(e.Err, slog.LevelInfo)
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() {
		placer.Follow(ctx, func(err error) {
			if err == nil {
				log.Info("fared exec: the slot table is maintained again")
				return
			}
			log.Error("fared exec: connections follow the previous weights", "error", err)
		})
	})
	return func() {
		cancel()
		wait.Wait()
	}
}

func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return path, nil
	case errors.Is(err, fs.ErrPermission):
		return "", cli.Exit(exitNotRun, err, "the program must be executable")
	case errors.Is(err, exec.ErrDot):
		return "", cli.Exit(exitNoProgram, err, "write ./"+name)
	}
	return "", cli.Exit(exitNoProgram, err, "name a program of PATH, or its path")
}

// cgroupDir returns the cgroup of the program, and a function that removes it if it is a new one.
func (o *execOptions) cgroupDir() (dir string, remove func() error, err error) {
	if o.cgroup != "" {
		if err := tcpslots.CheckCgroup(o.cgroup); err != nil {
			return "", nil, cli.Exit(exitExec, err, "name a directory below the mount point of cgroup2, such as /sys/fs/cgroup/NAME")
		}
		return o.cgroup, func() error { return nil }, nil
	}
	own, err := tcpslots.OwnCgroup()
	if err != nil {
		return "", nil, cli.Exit(exitExec, err, "mount it (mount -t cgroup2 none /sys/fs/cgroup), and in a container make it writable; or name a cgroup with --cgroup")
	}
	removeEmpty(own)
	dir = filepath.Join(own, fmt.Sprint(cgroupPrefix, os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", nil, cli.Exit(exitExec, fmt.Errorf("make a cgroup: %w", err), "run it as root, with a writable cgroup file system; or name a cgroup with --cgroup")
	}
	return dir, func() error { return unix.Rmdir(dir) }, nil
}

const cgroupPrefix = "fared-exec-" // and the process id of fared

// removeEmpty removes the cgroups of earlier runs whose programs left processes behind, once these have ended.
func removeEmpty(parent string) {
	found, _ := filepath.Glob(filepath.Join(parent, cgroupPrefix+"*")) // the pattern is valid
	for _, dir := range found {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), cgroupPrefix))
		if err == nil && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			_ = unix.Rmdir(dir) // the kernel refuses it while there are processes
		}
	}
}

func explainAttach(err error) error {
	switch {
	case errors.Is(err, tcpslots.ErrPrivileges):
		return cli.Exit(exitExec, err, "run it as root, or give it CAP_BPF and CAP_NET_ADMIN")
	case errors.Is(err, tcpslots.ErrKernel):
		return cli.Exit(exitExec, err, "it needs Linux 6.6 or later with CONFIG_CGROUP_BPF")
	}
	return cli.Exit(exitExec, err, "it needs Linux 6.6 or later with CONFIG_CGROUP_BPF, and a slot table ('fared slots')")
}

// forwarded are the signals that `fared exec` passes on. Their default is to end the process, or in SIGQUIT's case to
// dump it.
var forwarded = []os.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2}

// runProgram runs a program in a cgroup, and returns its exit code as cli.ProgramExit.
func runProgram(cgroup, path string, command []string) error {
	group, err := os.Open(cgroup)
	if err != nil {
		return cli.Exit(exitExec, err, "")
	}
	defer group.Close()
	return runForeground(&exec.Cmd{
		Path: path, Args: command,
		SysProcAttr: &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())},
	}, "the cgroup "+cgroup+" must accept processes")
}

// runForeground runs a program with the standard files of fared, passes signals on, and returns its exit code as
// cli.ProgramExit. remedy is for a program that does not start.
func runForeground(cmd *exec.Cmd, remedy string) error {
	signals := make(chan os.Signal, 16)
	for _, s := range forwarded {
		if !signal.Ignored(s) { // as by nohup: the program ignores it, too
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)
	// fared ignores SIGPIPE, and the program would inherit that. It gets the default for a signal with a handler.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, unix.SIGPIPE)
	defer signal.Ignore(unix.SIGPIPE)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		if errors.Is(err, unix.ENOEXEC) {
			return cli.Exit(exitNotRun, err, "the program is of another format")
		}
		return cli.Exit(exitExec, err, remedy)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			if number, ok := s.(unix.Signal); ok && !fromTerminal(number) {
				_ = cmd.Process.Signal(number) // an error means that the program has ended
			}
		case err := <-ended:
			return exitOf(cmd, err)
		}
	}
}

// exitOf returns the exit code of a program, as a shell would.
func exitOf(cmd *exec.Cmd, err error) error {
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return cli.Exit(exitExec, err, "")
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case ok && status.Signaled():
		return cli.ProgramExit(exitSignal + int(status.Signal()))
	case cmd.ProcessState.ExitCode() != 0:
		return cli.ProgramExit(cmd.ProcessState.ExitCode())
	}
	return nil
}

// fromTerminal reports whether the program, which is in the same process group, has received a signal from the terminal
// already.
func fromTerminal(s unix.Signal) bool {
	if s != unix.SIGINT && s != unix.SIGQUIT {
		return false
	}
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// report writes the numbers of connections.
func report(w io.Writer, table *slots.Table, placer *tcpslots.Placer) error {
	c, err := placer.Counts()
	if err != nil {
		return err
	}
	var planes []string
	placed := uint64(0)
	for i, n := range c.Planes {
		placed += n
		if i < len(table.Planes()) {
			planes = append(planes, fmt.Sprintf("%s %d", table.Planes()[i], n))
		}
	}
	fmt.Fprintf(w, "fared exec: %s placed: %s\n", cli.Several(int(placed), "connection"), strings.Join(planes, ", "))
	for _, left := range []struct {
		n   uint64
		why string
	}{
		{c.Unknown, "the destination has no slots"},
		{c.Bound, "the program has chosen the source port or the device"},
		{c.Taken, "the port of every slot of the plane is in use; weights.slots sets the number of slots"},
		{c.Address, "the network namespace does not have the loopback"},
		{c.Refused, "the kernel has refused the port"},
	} {
		if left.n > 0 {
			fmt.Fprintf(w, "fared exec: %s unchanged: %s\n", cli.Several(int(left.n), "connection"), left.why)
		}
	}
	return nil
}
