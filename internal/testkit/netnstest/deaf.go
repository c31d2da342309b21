package netnstest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Deafen makes programs miss every later event of a link in the namespace, as if the kernel delayed the events for
// ever: the rtnetlink sockets there leave the group of link events. It changes the sockets of this process, and of the
// processes whose network namespace it is. Without such a socket it fails the test.
func (n *Namespace) Deafen() {
	n.t.Helper()
	var space unix.Stat_t
	if err := unix.Stat(n.Path(), &space); err != nil {
		n.t.Fatal(err)
	}
	processes, err := os.ReadDir("/proc")
	if err != nil {
		n.t.Fatal(err)
	}
	left := 0
	for _, p := range processes {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		var own unix.Stat_t
		if pid != os.Getpid() && (unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &own) != nil || own.Ino != space.Ino) {
			continue
		}
		count, err := deafen(pid, space.Ino)
		if left += count; err != nil && !errors.Is(err, unix.ESRCH) { // it has ended
			n.t.Fatalf("process %d: %v", pid, err)
		}
	}
	if left == 0 {
		n.t.Fatalf("no socket receives the link events of %s", n.Name)
	}
}

// deafen makes a process's sockets in a namespace leave the group of link events, and returns their number.
func deafen(pid int, space uint64) (left int, err error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(process)
	folder := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, unix.ESRCH
	}
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		if to, err := os.Readlink(folder + "/" + file.Name()); err != nil || !strings.HasPrefix(to, "socket:") {
			continue
		}
		number, err := strconv.Atoi(file.Name())
		if err != nil {
			return left, err
		}
		fd, err := unix.PidfdGetfd(process, number, 0)
		if errors.Is(err, unix.EBADF) { // closed meanwhile
			continue
		}
		if err != nil {
			return left, err
		}
		if receivesLinks(fd, space) {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_DROP_MEMBERSHIP, unix.RTNLGRP_LINK)
			left++
		}
		unix.Close(fd)
		if err != nil {
			return left, err
		}
	}
	return left, nil
}

// receivesLinks reports whether a socket receives the link events of a namespace.
func receivesLinks(fd int, space uint64) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil || domain != unix.AF_NETLINK {
		return false
	}
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || protocol != unix.NETLINK_ROUTE {
		return false
	}
	groups, err := unix.GetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_LIST_MEMBERSHIPS)
	if err != nil || groups&(1<<(unix.RTNLGRP_LINK-1)) == 0 {
		return false
	}
	at, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return false
	}
	defer unix.Close(at)
	var own unix.Stat_t
	return unix.Fstat(at, &own) == nil && own.Ino == space
}
