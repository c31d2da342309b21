// Package cli is the part of a command line that the programs fared and fared-lab share: streams, flags, errors with
// their exit codes, output, the client of a daemon, logs.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/daemon/config"
)

// Env is a command's environment: its streams and common flags.
type Env struct {
	In       io.Reader
	Out, Err io.Writer
	Terminal *os.File // the terminal that out writes to, nil if out is no terminal
	Socket   string
	Patience time.Duration // for one answer of the daemon
	Output   string
}

// Main runs the command line of a process, and ends the process.
func Main(newRoot func(*Env) *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	// A closed pipe is an error of a write and does not end the process, because a daemon outlives its log's reader.
	signal.Ignore(syscall.SIGPIPE)
	logLibraries()
	os.Exit(Execute(ctx, newRoot, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// Execute runs one command line and returns the exit code.
func Execute(ctx context.Context, newRoot func(*Env) *cobra.Command, args []string, in io.Reader, out, errOut io.Writer) int {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	written := &stdout{w: out, stop: cancel}
	e := &Env{In: in, Out: written, Err: errOut, Terminal: terminal(out), Patience: Patience}
	root := newRoot(e)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if written.closed() {
		return ExitOK
	}
	if written.err != nil {
		err = Failed(fmt.Errorf("standard output: %w", written.err), "the output is incomplete")
	}
	if err == nil {
		return ExitOK
	}
	var program ProgramExit
	if errors.As(err, &program) {
		return int(program)
	}
	var coded *Error
	if !errors.As(err, &coded) {
		coded = &Error{Code: ExitUsage, Err: err, Remedy: "see fared --help"}
	}
	if inJournal(errOut) {
		errOut = &prioritized{errOut, priorityError}
	}
	var list config.Errors
	if errors.As(coded.Err, &list) { // for programs: each line begins with file:line:column, and the last one with a space
		fmt.Fprintln(errOut, coded.Error())
		coded.Remedy = strings.TrimSuffix(Several(len(list), "error")+": "+coded.Remedy, ": ")
	} else {
		fmt.Fprintf(errOut, "fared: %s\n", strings.TrimRight(coded.Error(), "\n"))
	}
	if coded.Remedy != "" {
		fmt.Fprintf(errOut, "  %s\n", coded.Remedy)
	}
	return coded.Code
}
