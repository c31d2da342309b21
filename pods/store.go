package pods

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/plainfile"
)

const extension = ".json"

// Store is a directory of records, one file a container. Processes share it.
type Store struct {
	// Dir is the directory, which Open creates.
	Dir string
}

// Entry is a container's file, which no other process changes or reads until Close.
type Entry struct {
	// Record is the zero value if the file is new.
	Record Record
	// New is true if there was no record.
	New  bool
	file *os.File
}

// Open locks a container's file. Close must follow. Without create, the error is fs.ErrNotExist if there is no record.
func (s Store) Open(container string, create bool) (*Entry, error) {
	flag := os.O_RDWR
	if create {
		if err := os.MkdirAll(s.Dir, 0o700); err != nil {
			return nil, err
		}
		flag |= os.O_CREATE
	}
	for {
		file, err := plainfile.Open(filepath.Join(s.Dir, container+extension), flag, 0o600)
		if err != nil {
			return nil, err
		}
		current, err := lock(file)
		if err != nil || !current {
			file.Close()
		}
		if err != nil {
			return nil, err
		}
		if current {
			return read(file)
		}
	}
}

// lock waits for the lock of a file, and reports whether the file still has its name.
func lock(file *os.File) (current bool, err error) {
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return false, &fs.PathError{Op: "lock", Path: file.Name(), Err: err}
	}
	var own, named unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &own); err != nil {
		return false, err
	}
	err = unix.Lstat(file.Name(), &named)
	return err == nil && own.Dev == named.Dev && own.Ino == named.Ino, nil
}

// read reads a file. One that a killed process has not completed counts as new.
func read(file *os.File) (*Entry, error) {
	e := &Entry{file: file}
	text, err := io.ReadAll(file)
	if err != nil {
		file.Close()
		return nil, err
	}
	if json.Unmarshal(text, &e.Record) != nil || e.Record.ID == "" {
		e.Record, e.New = Record{}, true
	}
	return e, nil
}

// Save writes the record.
func (e *Entry) Save() error {
	text, err := json.Marshal(&e.Record)
	if err != nil {
		return err
	}
	if _, err := e.file.WriteAt(text, 0); err != nil {
		return err
	}
	e.New = false
	return e.file.Truncate(int64(len(text)))
}

// Remove removes the file.
func (e *Entry) Remove() error {
	if err := os.Remove(e.file.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget the attachment: %w", err)
	}
	return nil
}

// Close unlocks the file. A new one without a record is removed.
func (e *Entry) Close() {
	if e.New {
		_ = e.Remove() // the next Open reads it as new
	}
	e.file.Close()
}

// Containers returns the names of all records, sorted.
func (s Store) Containers() ([]string, error) {
	files, err := os.ReadDir(s.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var all []string
	for _, f := range files {
		if name, ok := strings.CutSuffix(f.Name(), extension); ok {
			all = append(all, name)
		}
	}
	return all, err
}

// Shared reports whether a container other than this one has an attachment with an id: a pod's sandbox that was made
// again has the id of the former one.
func (s Store) Shared(container, id string) bool {
	all, _ := s.Containers()
	for _, other := range all {
		if other == container {
			continue
		}
		var r Record
		text, err := os.ReadFile(filepath.Join(s.Dir, other+extension)) // unlocked: only its id is of interest, which never changes
		if err == nil && json.Unmarshal(text, &r) == nil && r.ID == id && len(r.Interfaces) > 0 {
			return true
		}
	}
	return false
}
