// Package memfile opens memory that processes or machines share: the memory of a device, or an ordinary file.
package memfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Err is wrapped by errors of Kind if the file has no memory to share.
var Err = errors.New("shared file")

// Open opens a file for reading and writing, and makes it if it does not exist, but no file in the place of a device.
// It opens the file before it makes it: with O_CREAT the kernel refuses a file of another user in /dev/shm, whatever
// its permissions (fs.protected_regular).
func Open(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EACCES):
		return -1, fmt.Errorf("%w: its user, group and mode do not let this user read and write it", err)
	case !errors.Is(err, unix.ENOENT):
		return fd, err
	}
	dir, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return -1, err
	}
	var fs unix.Statfs_t
	if dir == "/dev" || unix.Statfs(dir, &fs) == nil && fs.Type == unix.SYSFS_MAGIC {
		return -1, fmt.Errorf("%w: there is no such device", unix.ENOENT)
	}
	return unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
}

// Kind reports whether an open file is the memory of a device, and its size in bytes; 0 if it is an empty file.
func Kind(fd int) (device bool, size int64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, 0, fmt.Errorf("stat: %w", err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFCHR:
		size, err = daxSize(fmt.Sprintf("/sys/dev/char/%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
		return true, size, err
	case unix.S_IFBLK:
		return false, 0, fmt.Errorf("%w: a block device: persistent memory is shared in the mode devdax (ndctl create-namespace --mode=devdax --map=mem), as /dev/daxX.Y", Err)
	default:
		return false, 0, fmt.Errorf("%w: neither a file nor a device with memory", Err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return false, 0, fmt.Errorf("statfs: %w", err)
	}
	return fs.Type == unix.SYSFS_MAGIC, st.Size, nil
}

// daxSize returns the size of the memory of a DAX device that can be mapped, in bytes, by the device's folder in sysfs.
// The device maps multiples of its alignment, of 4 KiB to 1 GiB.
func daxSize(dir string) (int64, error) {
	subsystem, err := os.Readlink(filepath.Join(dir, "subsystem"))
	if err != nil {
		return 0, fmt.Errorf("kind of the device: %w", err)
	}
	if name := filepath.Base(subsystem); name != "dax" {
		return 0, fmt.Errorf("%w: a character device of the kind %q: /dev/daxX.Y have memory to share", Err, name)
	}
	number := func(name string) (int64, error) {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return 0, fmt.Errorf("%s of the device: %w", name, err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil || n < 0 {
			return 0, fmt.Errorf("%s of the device: %q is not a number of bytes", name, text)
		}
		return n, nil
	}
	size, err := number("size")
	if err != nil {
		return 0, err
	}
	align, err := number("align")
	switch {
	case errors.Is(err, os.ErrNotExist): // before Linux 5.10
		align = 1
	case err != nil:
		return 0, err
	}
	if align > 1 {
		size -= size % align
	}
	if size == 0 {
		return 0, fmt.Errorf("%w: the device has less than its alignment of %d bytes", Err, align)
	}
	return size, nil
}
