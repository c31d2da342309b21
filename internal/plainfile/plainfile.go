// Package plainfile opens a process's own files, such as locks and journals, in directories that other users may
// change: a symbolic link, a hard link or a special file at the name would make a privileged process write to, truncate
// or wait for a file that the other user chose.
package plainfile

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrNotPlain reports that the file at a name is not a regular file with this name alone.
var ErrNotPlain = errors.New("is a symbolic link, a hard link or no regular file: move it away")

// Open is os.OpenFile for a regular file with one name; any other file at the name is an error that wraps ErrNotPlain.
// Links among the directories of the name are followed. The file is truncated, if flag requests it, only after it was
// found to be plain.
func Open(name string, flag int, mode fs.FileMode) (*os.File, error) {
	// O_NONBLOCK: a FIFO without a peer must not block. It has no effect on regular files.
	file, err := os.OpenFile(name, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: ErrNotPlain}
	}
	if err != nil {
		return nil, err
	}
	if err := check(file); err != nil {
		file.Close()
		return nil, err
	}
	if flag&os.O_TRUNC != 0 {
		if err := file.Truncate(0); err != nil {
			file.Close()
			return nil, err
		}
	}
	return file, nil
}

func check(file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		return &fs.PathError{Op: "open", Path: file.Name(), Err: unix.EISDIR}
	}
	if status, ok := info.Sys().(*syscall.Stat_t); !ok || !info.Mode().IsRegular() || status.Nlink > 1 {
		return &fs.PathError{Op: "open", Path: file.Name(), Err: ErrNotPlain}
	}
	return nil
}

// Replace creates a file that replaces another one of the name, such as a remainder of a process that was killed.
func Replace(name string, flag int, mode fs.FileMode) (*os.File, error) {
	// Not os.Remove, which removes a directory too.
	if err := unix.Unlink(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &fs.PathError{Op: "unlink", Path: name, Err: err}
	}
	return os.OpenFile(name, flag|os.O_CREATE|os.O_EXCL, mode)
}
