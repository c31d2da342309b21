package cli

import "fmt"

// Exit codes. They are part of the command line's contract (docs/operations.md).
const (
	ExitOK          = 0
	ExitFailed      = 1 // the command failed, such as an unmet expectation or a rejected reload
	ExitUsage       = 2 // a wrong flag, argument or configuration
	ExitUnreachable = 3 // the daemon does not answer
	ExitNotFound    = 4 // the daemon answers, and does not have the object
	// ExitConfig ends run and leaf on an invalid configuration (EX_CONFIG of sysexits.h): the unit's
	// RestartPreventExitStatus. It differs from ExitUsage, which is also the status of a Go program that panics or is
	// aborted by a watchdog, and has to be restarted.
	ExitConfig = 78
)

// Error carries an exit code and a remedy to the end of the program.
type Error struct {
	Code   int
	Err    error
	Remedy string
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Exit returns an error that ends the program with a code. An empty remedy prints none.
func Exit(code int, err error, remedy string) error { return &Error{code, err, remedy} }

// Failed returns an error that ends the program with ExitFailed.
func Failed(err error, remedy string) error { return Exit(ExitFailed, err, remedy) }

// Usage returns an error that ends the program with ExitUsage.
func Usage(err error, remedy string) error { return Exit(ExitUsage, err, remedy) }

// Unreachable returns an error that ends the program with ExitUnreachable.
func Unreachable(err error, remedy string) error { return Exit(ExitUnreachable, err, remedy) }

// NotFound returns an error that ends the program with ExitNotFound.
func NotFound(err error, remedy string) error { return Exit(ExitNotFound, err, remedy) }

// ProgramExit is the exit code of the program that `fared exec` has run.
type ProgramExit int

func (p ProgramExit) Error() string { return fmt.Sprintf("the program has ended with %d", int(p)) }
