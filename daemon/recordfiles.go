package daemon

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/internal/plainfile"
)

// recordFiles are the files of a recording: record.file, and older files with the suffixes .1, .2, ... A lock on
// FILE.lock excludes other processes from all of them.
type recordFiles struct {
	cfg     config.Record
	version string
	core    *core.Core
	lock    *os.File
}

// lockRecording takes the lock. It changes no recording.
func lockRecording(cfg config.Record, version string, c *core.Core) (*recordFiles, error) {
	lock, err := plainfile.Open(cfg.File+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("record.file: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("record.file: another fared writes %s: stop that process, or set another file", cfg.File)
		}
		return nil, fmt.Errorf("record.file: lock %s.lock: %w", cfg.File, err)
	}
	return &recordFiles{cfg: cfg, version: version, core: c, lock: lock}, nil
}

func (f *recordFiles) close() error { return f.lock.Close() }

// rotate renames the existing files, removes the oldest one beyond record.keep, and creates FILE.
func (f *recordFiles) rotate() (*os.File, error) {
	for n := f.cfg.Keep; n >= 1; n-- {
		if err := os.Rename(recordName(f.cfg.File, n-1), recordName(f.cfg.File, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("record.file: %w", err)
		}
	}
	file, err := os.OpenFile(f.cfg.File, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("record.file: %w", err)
	}
	return file, nil
}

// recordName returns the name of a file after n rotations.
func recordName(file string, n int) string {
	if n == 0 {
		return file
	}
	return file + "." + strconv.Itoa(n)
}

// OpenRecording opens a recording for Replay, from its first file to the named one, FILE or FILE.n. If the first files
// were removed, it begins with the oldest existing one.
func OpenRecording(name string) (io.ReadCloser, error) {
	base, n := name, 0
	if i := strings.LastIndexByte(name, '.'); i > 0 {
		if number, err := strconv.Atoi(name[i+1:]); err == nil && number > 0 {
			base, n = name[:i], number
		}
	}
	r := &recordingReader{}
	var readers []io.Reader
	for before := uint64(0); ; n++ {
		file := recordName(base, n)
		if len(r.files) == 0 {
			file = name
		}
		f, err := os.Open(file)
		if errors.Is(err, fs.ErrNotExist) && len(r.files) > 0 {
			break
		}
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		buffered := bufio.NewReaderSize(f, 64<<10)
		first, err := buffered.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, errors.Join(fmt.Errorf("%s: %w", file, err), f.Close(), r.Close())
		}
		var header core.RecordLine
		if json.Unmarshal([]byte(first), &header) != nil { // Replay reports the error
			header.Continues = 0
		}
		if len(r.files) > 0 && header.Continues >= before { // part of another recording
			f.Close()
			break
		}
		r.files = append(r.files, f)
		readers = append(readers, io.MultiReader(strings.NewReader(first), buffered))
		if before = header.Continues; before == 0 {
			break
		}
	}
	slices.Reverse(readers)
	r.Reader = io.MultiReader(readers...)
	return r, nil
}

// recordingReader reads files one after another.
type recordingReader struct {
	io.Reader
	files []*os.File
}

// Close closes the files.
func (r *recordingReader) Close() error {
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
