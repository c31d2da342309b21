package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
)

// nodeNamespace matches the name of a node's namespace: fared-<run>-<node>. A run is the lab's process id, with a
// number appended from the second fabric of a process on.
var nodeNamespace = regexp.MustCompile(`^fared-(([0-9]+)(?:_[0-9]+)?)-(?:server|leaf|spine)[0-9]+(?:-[0-9]+)?$`)

// runDir is the prefix of the name of a run's folder in the folder for temporary files; the run's name follows.
const runDir = "fared-lab-"

// newRun creates the folder of a run, which names the run, and locks it for as long as the file is open.
func newRun() (dir string, lock *os.File, err error) {
	// The folder is renamed only after it is locked, so that no other lab takes it for an abandoned one.
	nameless, err := os.MkdirTemp("", "."+runDir)
	if err != nil {
		return "", nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(nameless))
		}
	}()
	if err := os.Chmod(nameless, 0o755); err != nil { // FRR's user must be able to enter it
		return "", nil, err
	}
	lock, err = os.OpenFile(filepath.Join(nameless, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return "", nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	for n := 1; n < 10_000; n++ {
		run := strconv.Itoa(os.Getpid())
		if n > 1 {
			run += fmt.Sprintf("_%d", n) // a dot is not allowed in the name of a BPF file system entry
		}
		dir = filepath.Join(os.TempDir(), runDir+run)
		if err = os.Rename(nameless, dir); err == nil {
			return dir, lock, nil
		}
		if !errors.Is(err, os.ErrExist) {
			break
		}
	}
	lock.Close()
	return "", nil, errors.Join(err, NewOptionError("remove the leftovers of earlier runs: {Cleanup}"))
}

// abandoned reports whether the lab that created a run has ended: its process does not exist, or another process has
// its number and does not hold the run's lock.
func abandoned(run string) bool {
	pid, _, _ := strings.Cut(run, "_")
	if _, err := os.Stat(filepath.Join("/proc", pid)); err != nil {
		return true
	}
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), runDir+run, "lock"), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer lock.Close()
	return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}

// Cleanup removes the leftovers of fabrics of namespaces that have failed or whose process has ended, by a crash or by
// Leave: processes, namespaces and files. It returns the removed namespaces and folders, sorted.
func Cleanup(ctx context.Context) ([]string, error) {
	runs := map[string][]Namespace{}
	entries, err := os.ReadDir(netns.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if m := nodeNamespace.FindStringSubmatch(e.Name()); m != nil {
			runs[m[1]] = append(runs[m[1]], Namespace(e.Name()))
		}
	}
	folders, err := filepath.Glob(filepath.Join(os.TempDir(), runDir+"*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range folders {
		run := strings.TrimPrefix(filepath.Base(dir), runDir)
		if _, known := runs[run]; !known && nodeNamespace.MatchString("fared-"+run+"-leaf0") {
			runs[run] = nil
		}
	}
	var removed []string
	var errs []error
	for run, nodes := range runs {
		if !abandoned(run) {
			continue
		}
		var failed error
		for _, ns := range nodes {
			if err := remove(ctx, ns); err != nil {
				failed = errors.Join(failed, err)
				continue
			}
			removed = append(removed, string(ns))
		}
		dir := filepath.Join(os.TempDir(), runDir+run)
		if _, err := os.Stat(dir); err == nil && failed == nil {
			if failed = os.RemoveAll(dir); failed == nil {
				removed = append(removed, dir)
			}
		}
		errs = append(errs, failed)
	}
	slices.Sort(removed)
	return removed, errors.Join(errs...)
}

// remove kills every process in a namespace and removes the namespace, with its BPF pins.
func remove(ctx context.Context, ns Namespace) error {
	for deadline := time.Now().Add(5 * time.Second); ; {
		out, err := run(ctx, "", "ip", "netns", "pids", string(ns))
		if err != nil {
			return unlessGone(ns, err)
		}
		pids := strings.Fields(string(out))
		if len(pids) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: processes %s do not end", ns, strings.Join(pids, ", "))
		}
		for _, text := range pids {
			if pid, err := strconv.Atoi(text); err == nil && pid > 1 && pid != os.Getpid() {
				_ = unix.Kill(pid, unix.SIGKILL) // an error means that it has already ended
			}
		}
		if err := Sleep(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	_, err := run(ctx, "", "ip", "netns", "del", string(ns))
	return errors.Join(unlessGone(ns, err), os.RemoveAll(pins(ns)))
}

// unlessGone returns err unless the namespace no longer exists: another cleanup has removed it meanwhile.
func unlessGone(ns Namespace, err error) error {
	if _, gone := os.Stat(filepath.Join(netns.Dir, string(ns))); errors.Is(gone, os.ErrNotExist) {
		return nil
	}
	return err
}

// Sleep waits for d, or returns the context's error if that ends first.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
