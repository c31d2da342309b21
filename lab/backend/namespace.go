package backend

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/topo"
)

// Namespace is a network namespace by its name in `ip netns`.
type Namespace string

// Do calls f on a thread inside the namespace. A thread that cannot return to its own namespace is terminated.
func (n Namespace) Do(f func() error) error { return netns.In(string(n), f) }

// sysctl writes settings of the namespace's kernel.
func (n Namespace) sysctl(settings []topo.Sysctl) error {
	return n.Do(func() error {
		var errs []error
		for _, s := range settings {
			err := os.WriteFile(filepath.Join("/proc/sys", strings.ReplaceAll(s.Name, ".", "/")), []byte(s.Value), 0)
			if s.Name == topo.HashSeed && errors.Is(err, os.ErrNotExist) {
				continue // before Linux 6.11; the documentation of topo.HashSeed describes the consequence
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// batch runs lines by ip or tc in the namespace.
func (n Namespace) batch(ctx context.Context, tool string, lines []string) error {
	return batch(ctx, lines, tool, "-n", string(n))
}

// batch runs lines by ip or tc; it stops at the first line that fails.
func batch(ctx context.Context, lines []string, tool string, args ...string) error {
	if len(lines) == 0 {
		return nil
	}
	_, err := run(ctx, strings.Join(lines, "\n")+"\n", tool, append(args, "-batch", "-")...)
	return err
}

// run runs a program to its end; the error includes its standard error.
func run(ctx context.Context, in, tool string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, tool, args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in), &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, failedLine(in, errOut.String()))
	}
	return out.Bytes(), nil
}

// failedLine appends to an error of ip or tc the batch line that the error refers to ("Command failed
// -:3").
func failedLine(in, output string) string {
	output = strings.TrimSpace(output)
	if _, at, ok := strings.Cut(output, "Command failed -:"); ok {
		var n int
		lines := strings.Split(in, "\n")
		if _, err := fmt.Sscan(at, &n); err == nil && n >= 1 && n <= len(lines) {
			return fmt.Sprintf("%s (%s)", output, lines[n-1])
		}
	}
	return output
}
