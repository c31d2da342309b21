package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/cmd/internal/cli"
)

// asFared makes the test binary act as fared: tests that need separate processes start it with this variable set.
const asFared = "FARED_TEST_AS_FARED"

func TestMain(m *testing.M) {
	if os.Getenv(asFared) != "" {
		main()
	}
	if dir := os.Getenv(asFaulty); dir != "" {
		if err := beFaulty(dir); err != nil {
			fmt.Fprintln(os.Stderr, "faulty:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if doors := os.Getenv(asStranger); doors != "" {
		if err := beStranger(doors); err != nil {
			fmt.Fprintln(os.Stderr, "stranger:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	time.Local = time.UTC // for the times in golden files
	os.Unsetenv("NO_COLOR")
	goleak.VerifyTestMain(m,
		// The one goroutine that GoBGP never ends (daemon/internal/speaker, doc.go).
		goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve"))
}

// outcome is the result of a command line.
type outcome struct {
	code     int
	out, err string
}

// execute runs a command line of fared and returns the exit code.
func execute(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	return cli.Execute(ctx, newRoot, args, in, out, errOut)
}

// fared runs a command line inside the test's process.
func fared(t *testing.T, args ...string) outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	code := execute(t.Context(), args, strings.NewReader(""), &out, &errOut)
	return outcome{code, out.String(), errOut.String()}
}

// must runs a command line, requires success, and returns its standard output.
func must(t *testing.T, args ...string) string {
	t.Helper()
	o := fared(t, args...)
	if o.code != cli.ExitOK || o.err != "" {
		t.Fatalf("fared %s: exit %d, standard error:\n%s", strings.Join(args, " "), o.code, o.err)
	}
	return o.out
}

// refused runs a command line and requires failure: no standard output, and the error and a remedy on standard error.
func refused(t *testing.T, code int, args ...string) string {
	t.Helper()
	o := fared(t, args...)
	if o.code != code {
		t.Errorf("fared %s: exit %d, want %d; standard error:\n%s", strings.Join(args, " "), o.code, code, o.err)
	}
	if o.out != "" {
		t.Errorf("fared %s: an error, and on standard output:\n%s", strings.Join(args, " "), o.out)
	}
	if !explains(o.err) {
		t.Errorf("fared %s: standard error has no error with a remedy:\n%s", strings.Join(args, " "), o.err)
	}
	return o.err
}

// explains reports whether a text ends with an error and a remedy.
func explains(text string) bool {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	first := strings.Contains("\n"+text, "\nfared: ") || regexp.MustCompile(`^[^:]+:\d+:\d+: `).MatchString(text)
	return len(lines) >= 2 && first && strings.HasPrefix(lines[len(lines)-1], "  ")
}

// generous limits waits for a condition. It is far above their normal duration, so that a busy machine does not fail a test.
const generous = 2 * time.Minute

// background runs a command line until the test ends it; lines receives each line of its output.
type background struct {
	lines chan string
	stop  context.CancelFunc
	code  chan int
	err   *bytes.Buffer
}

func inBackground(t *testing.T, args ...string) *background {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	b := &background{lines: make(chan string, 1024), stop: cancel, code: make(chan int, 1), err: new(bytes.Buffer)}
	go func() { b.code <- execute(ctx, args, strings.NewReader(""), &liner{to: b.lines}, b.err) }()
	t.Cleanup(func() {
		cancel()
		select {
		case code := <-b.code:
			b.code <- code
		case <-time.After(generous):
			t.Errorf("fared %s does not end", strings.Join(args, " "))
		}
	})
	return b
}

// until returns the first line that contains a text.
func (b *background) until(t *testing.T, text string) string {
	t.Helper()
	return b.match(t, fmt.Sprintf("%q", text), func(line string) bool { return strings.Contains(line, text) })
}

// match returns the first line for which wanted is true.
func (b *background) match(t *testing.T, what string, wanted func(line string) bool) string {
	t.Helper()
	limit := time.After(generous)
	var seen []string
	for {
		select {
		case line := <-b.lines:
			if wanted(line) {
				return line
			}
			seen = append(seen, line)
		case <-limit:
			t.Fatalf("no line with %s within %s, but:\n%s", what, generous, strings.Join(seen, "\n"))
		}
	}
}

// end stops the command as Ctrl-C does and returns the exit code.
func (b *background) end(t *testing.T) int {
	t.Helper()
	b.stop()
	select {
	case code := <-b.code:
		b.code <- code
		return code
	case <-time.After(generous):
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
