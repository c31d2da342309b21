package bpf

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// outlives returns "" if pins below dir outlive the process, and otherwise the reason. A BPF file system that was
// mounted in a private mount namespace (unshare -m, ip netns exec, a container) ends with the last process in it, and
// with it the program and all its maps.
func outlives(dir string) string {
	for _, pid := range []int{1, os.Getppid()} {
		if pid == os.Getpid() || pid == 0 {
			continue
		}
		if same, known := sees(pid, dir); known && same {
			return ""
		} else if known {
			return fmt.Sprintf("%s is mounted in a mount namespace that process %d does not share: program and maps end with the agent, and flows then leave their slots; "+
				"mount the BPF file system outside before the start, or run the agent in that mount namespace", dir, pid)
		}
	}
	// Neither process can be inspected. A mount with peers or a master also exists in another namespace.
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || propagates(mounts, dir) {
		return ""
	}
	return dir + " is mounted in a mount namespace that possibly no other process shares: program and maps may end with the agent; mount the BPF file system outside"
}

// sees reports whether a process has the same directory under the same name. known is false if the process cannot be
// inspected.
func sees(pid int, dir string) (same, known bool) {
	var own, other unix.Stat_t
	if unix.Stat(dir, &own) != nil {
		return false, false
	}
	err := unix.Stat(fmt.Sprintf("/proc/%d/root%s", pid, dir), &other)
	if errors.Is(err, fs.ErrNotExist) {
		return false, true
	}
	return err == nil && own.Dev == other.Dev && own.Ino == other.Ino, err == nil
}

// propagates reports whether the mount of a directory is shared with, or came from, another mount namespace
// (proc_pid_mountinfo(5)).
func propagates(mountinfo []byte, dir string) (yes bool) {
	longest := 0
	for line := range bytes.Lines(mountinfo) {
		fields := strings.Fields(string(line))
		if len(fields) < 7 {
			continue
		}
		point, n := fields[4], len(fields[4])
		if n < longest || dir != point && !strings.HasPrefix(dir, strings.TrimSuffix(point, "/")+"/") {
			continue
		}
		longest, yes = n, false
		for _, tag := range fields[6:] {
			if tag == "-" {
				break
			}
			yes = yes || strings.HasPrefix(tag, "shared:") || strings.HasPrefix(tag, "master:")
		}
	}
	return yes
}
