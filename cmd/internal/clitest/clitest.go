// Package clitest runs command lines in tests: inside the test's process, in the background, in separate processes, and
// from golden files.
package clitest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/goleak"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testlog"
)

// AsFared makes the test binary act as fared: tests that need separate processes start it with this variable set.
const AsFared = "FARED_TEST_AS_FARED"

// Outcome is the result of a command line.
type Outcome struct {
	Code     int
	Out, Err string
}

// newRoot is that of the program under test.
var newRoot func(*cli.Env) *cobra.Command

// Begin begins TestMain. root and main are those of the program under test, which the process is if AsFared is set.
func Begin(root func(*cli.Env) *cobra.Command, main func()) {
	newRoot = root
	if os.Getenv(AsFared) != "" {
		main()
	}
}

// Main ends TestMain: it runs the tests, in UTC as in golden files, and requires that goroutines end.
func Main(m *testing.M) {
	time.Local = time.UTC
	os.Unsetenv("NO_COLOR")
	goleak.VerifyTestMain(m,
		// The one goroutine that GoBGP never ends (daemon/internal/speaker, doc.go).
		goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve"))
}

// Execute runs a command line of fared and returns the exit code.
func Execute(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	return cli.Execute(ctx, newRoot, args, in, out, errOut)
}

// Run runs a command line inside the test's process.
func Run(t *testing.T, args ...string) Outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	code := Execute(t.Context(), args, strings.NewReader(""), &out, &errOut)
	return Outcome{code, out.String(), errOut.String()}
}

// Must runs a command line, requires success, and returns its standard output.
func Must(t *testing.T, args ...string) string {
	t.Helper()
	o := Run(t, args...)
	if o.Code != cli.ExitOK || o.Err != "" {
		t.Fatalf("fared %s: exit %d, standard error:\n%s", strings.Join(args, " "), o.Code, o.Err)
	}
	return o.Out
}

// Refused runs a command line and requires failure: no standard output, and the error and a remedy on standard error.
func Refused(t *testing.T, code int, args ...string) string {
	t.Helper()
	o := Run(t, args...)
	if o.Code != code {
		t.Errorf("fared %s: exit %d, want %d; standard error:\n%s", strings.Join(args, " "), o.Code, code, o.Err)
	}
	if o.Out != "" {
		t.Errorf("fared %s: an error, and on standard output:\n%s", strings.Join(args, " "), o.Out)
	}
	if !Explains(o.Err) {
		t.Errorf("fared %s: standard error has no error with a remedy:\n%s", strings.Join(args, " "), o.Err)
	}
	return o.Err
}

// Explains reports whether a text ends with an error and a remedy.
func Explains(text string) bool {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	first := strings.Contains("\n"+text, "\nfared: ") || regexp.MustCompile(`^[^:]+:\d+:\d+: `).MatchString(text)
	return len(lines) >= 2 && first && strings.HasPrefix(lines[len(lines)-1], "  ")
}

// Generous limits waits for a condition. It is far above their normal duration, so that a busy machine does not fail a
// test.
const Generous = 2 * time.Minute

// Background runs a command line until the test ends it; lines receives each line of its output.
type Background struct {
	Lines chan string
	Stop  context.CancelFunc
	Code  chan int
	Err   *bytes.Buffer
}

// InBackground starts a command line inside the test's process.
func InBackground(t *testing.T, args ...string) *Background {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	b := &Background{Lines: make(chan string, 1024), Stop: cancel, Code: make(chan int, 1), Err: new(bytes.Buffer)}
	go func() { b.Code <- Execute(ctx, args, strings.NewReader(""), &liner{to: b.Lines}, b.Err) }()
	t.Cleanup(func() {
		cancel()
		select {
		case code := <-b.Code:
			b.Code <- code
		case <-time.After(Generous):
			t.Errorf("fared %s does not end", strings.Join(args, " "))
		}
	})
	return b
}

// Until returns the first line that contains a text.
func (b *Background) Until(t *testing.T, text string) string {
	t.Helper()
	return b.Match(t, fmt.Sprintf("%q", text), func(line string) bool { return strings.Contains(line, text) })
}

// Match returns the first line for which wanted is true.
func (b *Background) Match(t *testing.T, what string, wanted func(line string) bool) string {
	t.Helper()
	limit := time.After(Generous)
	var seen []string
	for {
		select {
		case line := <-b.Lines:
			if wanted(line) {
				return line
			}
			seen = append(seen, line)
		case <-limit:
			t.Fatalf("no line with %s within %s, but:\n%s", what, Generous, strings.Join(seen, "\n"))
		}
	}
}

// End stops the command as Ctrl-C does and returns the exit code.
func (b *Background) End(t *testing.T) int {
	t.Helper()
	b.Stop()
	select {
	case code := <-b.Code:
		b.Code <- code
		return code
	case <-time.After(Generous):
		t.Fatal("the command does not end")
		return -1
	}
}

// liner sends whole lines to a channel.
type liner struct {
	to   chan<- string
	part []byte
}

func (l *liner) Write(b []byte) (int, error) {
	l.part = append(l.part, b...)
	for {
		line, rest, ok := bytes.Cut(l.part, []byte("\n"))
		if !ok {
			return len(b), nil
		}
		l.to <- string(line)
		l.part = rest
	}
}

// Within waits for a condition; the condition's error names the missing state.
func Within(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	netnstest.Eventually(t, limit, check)
}

// Process is a fared in a separate process.
type Process struct {
	Cmd  *exec.Cmd
	Log  testlog.Log
	Done chan struct{} // closed when the process has ended
}

// Start starts fared in a separate process, which ends with the test.
func Start(t *testing.T, args ...string) *Process {
	t.Helper()
	self := Executable(t)
	p := &Process{Cmd: exec.Command(self, args...), Done: make(chan struct{})}
	p.Cmd.Env = append(os.Environ(), AsFared+"=1")
	p.Cmd.Stdout, p.Cmd.Stderr = &p.Log, &p.Log
	if err := p.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.Cmd.Wait()
		close(p.Done)
	}()
	t.Cleanup(func() {
		p.Cmd.Process.Kill()
		<-p.Done
		if t.Failed() {
			t.Logf("fared %s wrote:\n%s", strings.Join(args, " "), p.Log.String())
		}
	})
	return p
}

// End sends a signal and returns the exit code, -1 for a process that a signal ended.
func (p *Process) End(t *testing.T, s syscall.Signal) int {
	t.Helper()
	if err := p.Cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
	return p.Ended(t)
}

// Ended waits for the end of the process and returns its exit code.
func (p *Process) Ended(t *testing.T) int {
	t.Helper()
	select {
	case <-p.Done:
	case <-time.After(Generous):
		t.Fatal("the process does not end")
	}
	return p.Cmd.ProcessState.ExitCode()
}

// Running returns an error if the process has ended.
func (p *Process) Running() error {
	select {
	case <-p.Done:
		return fmt.Errorf("the process has ended: %s", p.Cmd.ProcessState)
	default:
		return nil
	}
}

// Executable returns the path of the test binary, which is fared if asFared is set.
func Executable(t testing.TB) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
