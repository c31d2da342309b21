package journal

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/plainfile"
)

const (
	// slack is the size in bytes by which the file may exceed four times the size of the state before it is rewritten.
	slack = 1 << 20
	// patience is the pause after a failed write.
	patience = time.Second
)

// InUseError reports that another process has the journal open.
type InUseError struct{ Path string }

func (e *InUseError) Error() string {
	return fmt.Sprintf("another data-plane agent keeps %s: stop that agent, or use another runtime directory for this one", e.Path)
}

// Stats holds counters since Open, and sizes.
type Stats struct {
	// Bytes is the length of the file, StateBytes the length that the state alone needs.
	Bytes, StateBytes int64
	// Records counts written records, Rewrites complete rewrites of the file.
	Records, Rewrites uint64
	// Errors counts failed writes. Behind is true while the file lacks records.
	Errors uint64
	Behind bool
}

// Journal is an open journal; it implements contract.Journal. It is safe for concurrent use. Use Open.
type Journal struct {
	path string
	log  *slog.Logger
	lock *os.File

	mu        sync.Mutex // guards everything below
	file      *os.File   // nil after Close
	image     image
	stats     Stats
	retry     time.Time // while Behind: time of the next attempt
	logged    bool      // while Behind: the error was logged
	scratch   []byte
	rewriting chan struct{} // closed at the end of the current rewrite; nil without a rewrite
	since     []byte        // records since the current rewrite began
}

// Open opens or creates a journal and returns its state: forwarding is nil if it is empty, and sub-ports are only those
// that are down. The error is an *InUseError while another process has it open. Close must follow.
func Open(path string, log *slog.Logger) (_ *Journal, _ *farev1.Forwarding, _ *farev1.SnapshotResponse, err error) {
	j := &Journal{path: path, log: log}
	if j.lock, err = lockFile(path); err != nil {
		return nil, nil, nil, err
	}
	defer func() {
		if err != nil {
			j.lock.Close()
		}
	}()
	if j.image, j.stats.Bytes, err = j.load(); err != nil {
		return nil, nil, nil, err
	}
	if j.file, err = plainfile.Open(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		return nil, nil, nil, fmt.Errorf("journal: %w: its directory must exist and be writable", err)
	}
	if j.stats.Bytes == 0 {
		j.append(versionBytes, 0)
	}
	return j, j.image.forwarding, j.image.snapshot(), nil
}

func lockFile(path string) (*os.File, error) {
	lock, err := plainfile.Open(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("journal: %w: its directory must exist and be writable", err)
	}
	for {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &InUseError{path}
		}
		return nil, fmt.Errorf("lock the journal %s: %w", path, err)
	}
	return lock, nil
}

// load reads the file, truncates an incomplete last record, and renames a damaged file.
func (j *Journal) load() (image, int64, error) {
	file, err := plainfile.Open(j.path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return newImage(), 0, nil
	}
	if err != nil {
		return image{}, 0, fmt.Errorf("journal: %w", err)
	}
	defer file.Close()
	i, good, err := read(file)
	var failed *os.PathError
	switch {
	case err == nil:
		return i, good, nil
	case errors.Is(err, errTorn):
		j.log.Warn("the journal's last record is incomplete and is dropped: the process ended during a write", "journal", j.path, "bytes_kept", good)
		if err := file.Truncate(good); err != nil {
			return image{}, 0, fmt.Errorf("truncate the journal: %w", err)
		}
		return i, good, nil
	case errors.As(err, &failed):
		return image{}, 0, fmt.Errorf("read the journal: %w", err)
	}
	aside, moveErr := setAside(j.path)
	if moveErr != nil {
		return image{}, 0, fmt.Errorf("journal %s is damaged (%w) and cannot be renamed: %w", j.path, err, moveErr)
	}
	j.log.Error("the journal is damaged and was set aside; the state begins empty", "journal", j.path, "set_aside", aside, "error", err, "bytes_good", good)
	return newImage(), 0, nil
}

// setAside renames a file to an unused name.
func setAside(path string) (string, error) {
	stamp := time.Now().UTC().Format("20060102T150405Z")
	for n := 1; ; n++ {
		aside := fmt.Sprintf("%s.damaged-%s-%d", path, stamp, n)
		err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, aside, unix.RENAME_NOREPLACE)
		if !errors.Is(err, unix.EEXIST) {
			return aside, err
		}
	}
}

// Forwarding implements contract.Journal.
func (j *Journal) Forwarding(forwarding *farev1.Forwarding) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.image.forward(forwarding)
	b, err := appendRecord(j.scratch[:0], forwardingRecord, forwarding)
	if err != nil {
		j.failed(err)
		return
	}
	j.scratch, j.image.forwardingBytes = b, int64(len(b))
	j.append(b, 1)
}

// Operations implements contract.Journal. Operations that change nothing are not written.
func (j *Journal) Operations(operations []*farev1.Operation) {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, records := j.scratch[:0], uint64(0)
	for _, operation := range operations {
		if !j.image.news(operation) {
			continue
		}
		before := len(b)
		var err error
		if b, err = appendRecord(b, operationRecord, operation); err != nil {
			j.failed(err)
		}
		records++
		j.image.apply(operation, int64(len(b)-before))
	}
	j.scratch = b
	if records > 0 {
		j.append(b, records)
	}
	if cap(j.scratch) > slack {
		j.scratch = nil
	}
}

// append writes whole records. The caller holds mu.
func (j *Journal) append(b []byte, records uint64) {
	if j.file == nil {
		return
	}
	if j.rewriting != nil {
		j.since = append(j.since, b...)
	}
	if j.stats.Behind {
		j.catchUp()
		return
	}
	n, err := j.file.Write(b)
	if err != nil {
		if n > 0 { // later records must not follow an incomplete one
			err = errors.Join(err, j.file.Truncate(j.stats.Bytes))
		}
		j.failed(err)
		return
	}
	j.stats.Bytes += int64(n)
	j.stats.Records += records
	if j.rewriting == nil && !time.Now().Before(j.retry) && j.stats.Bytes > 4*j.image.size()+slack {
		j.rewrite()
	}
}

// failed records that the file lacks records. The caller holds mu.
func (j *Journal) failed(err error) {
	j.stats.Behind = true
	j.complain(err)
}

// complain counts an error, and logs the first of a series. The caller holds mu.
func (j *Journal) complain(err error) {
	j.stats.Errors++
	j.retry = time.Now().Add(patience)
	if !j.logged {
		j.logged = true
		j.log.Error("the journal cannot be written; forwarding continues, but a restart would begin with an older state; retrying",
			"journal", j.path, "complete", !j.stats.Behind, "error", err)
	}
}

// catchUp rewrites the file if it lacks records and the pause is over. The caller holds mu.
func (j *Journal) catchUp() {
	if j.stats.Behind && j.rewriting == nil && j.file != nil && !time.Now().Before(j.retry) {
		j.rewrite()
	}
}

// CatchUp retries failed writes, in the background. It does nothing if the file is complete. It has to be called
// periodically.
func (j *Journal) CatchUp() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.catchUp()
}

// rewrite writes the image to a new file and renames it over the journal, in the background: writing a large state
// takes as long as several failovers. The caller holds mu.
func (j *Journal) rewrite() {
	done := make(chan struct{})
	j.rewriting, j.since = done, nil
	forwarding, items := j.image.forwarding, j.image.items()
	go func() {
		defer close(done)
		temp, size, err := writeAll(j.path+".new", forwarding, items)
		j.mu.Lock()
		defer j.mu.Unlock()
		j.rewriting = nil
		if err == nil {
			size, err = j.replace(temp, size)
		}
		j.since = nil
		if err != nil { // the old file keeps growing, or still lacks records
			j.complain(err)
			return
		}
		j.stats.Bytes = size
		j.stats.Rewrites++
		if j.logged {
			j.log.Info("the journal is written again and is complete", "journal", j.path)
		}
		j.stats.Behind, j.logged = false, false
	}()
}

// replace completes a new file and renames it over the journal. The caller holds mu.
func (j *Journal) replace(temp *os.File, size int64) (int64, error) {
	n, err := temp.Write(j.since)
	if err == nil {
		err = os.Rename(temp.Name(), j.path)
	}
	if err != nil {
		return 0, errors.Join(err, temp.Close(), os.Remove(temp.Name()))
	}
	_ = j.file.Close() // the old file is unlinked
	j.file = temp
	return size + int64(n), nil
}

// writeAll writes a whole state to a file.
func writeAll(path string, forwarding *farev1.Forwarding, items []item) (_ *os.File, size int64, err error) {
	file, err := plainfile.Replace(path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close(), os.Remove(path))
		}
	}()
	w := bufio.NewWriterSize(file, 64<<10)
	write := func(b []byte) {
		size += int64(len(b))
		_, _ = w.Write(b) // Flush returns the first error
	}
	write(versionBytes)
	var b []byte
	if forwarding != nil {
		if b, err = appendRecord(b, forwardingRecord, forwarding); err != nil {
			return nil, 0, err
		}
		write(b)
	}
	for i := range items {
		if b, err = appendRecord(b[:0], operationRecord, items[i].set()); err != nil {
			return nil, 0, err
		}
		write(b)
	}
	return file, size, w.Flush()
}

// Stats returns the current counters.
func (j *Journal) Stats() Stats {
	j.mu.Lock()
	defer j.mu.Unlock()
	stats := j.stats
	stats.StateBytes = j.image.size()
	return stats
}

// Close writes missing records and closes the file. Later calls of other methods are ignored; a second Close returns
// nil.
func (j *Journal) Close() error {
	j.mu.Lock()
	for j.rewriting != nil {
		done := j.rewriting
		j.mu.Unlock()
		<-done
		j.mu.Lock()
	}
	defer j.mu.Unlock()
	if j.file == nil {
		return nil
	}
	var err error
	if j.stats.Behind {
		var temp *os.File
		var size int64
		if temp, size, err = writeAll(j.path+".new", j.image.forwarding, j.image.items()); err == nil {
			j.stats.Bytes, err = j.replace(temp, size)
		}
		if err != nil {
			err = fmt.Errorf("journal %s: cannot write all records: %w", j.path, err)
		}
	}
	err = errors.Join(err, j.file.Close(), j.lock.Close())
	j.file = nil
	return err
}

// Remove deletes the file of a journal. It fails with an *InUseError while a process has it open.
func Remove(path string) error {
	lock, err := lockFile(path)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

var _ io.Closer = (*Journal)(nil)
