package tcpslots

import (
	"errors"
	"strings"
	"testing"
)

// TestOwnCgroup finds the directory in the layouts of hosts and containers.
func TestOwnCgroup(t *testing.T) {
	const unified = "24 1 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
	for _, test := range []struct{ mounts, cgroups, want string }{
		{unified, "0::/user.slice/session-1.scope\n", "/sys/fs/cgroup/user.slice/session-1.scope"},
		{unified, "0::/\n", "/sys/fs/cgroup"},
		{"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 22 0:27 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n", "4:memory:/x\n0::/a\n", "/sys/fs/cgroup/unified/a"},
		{"24 1 0:22 / /mnt/a\\040b rw - cgroup2 none rw\n", "0::/a\n", "/mnt/a b/a"},
		// A container without a cgroup namespace sees the host's paths, and its own part of the file system.
		{"24 1 0:22 /docker/1f /sys/fs/cgroup rw - cgroup2 none rw\n", "0::/docker/1f/job\n", "/sys/fs/cgroup/job"},
		{"24 1 0:22 /docker/1f /sys/fs/cgroup rw - cgroup2 none rw\n", "0::/docker/1f\n", "/sys/fs/cgroup"},
		{"24 1 0:22 /docker/1f /sys/fs/cgroup rw - cgroup2 none rw\n", "0::/docker/1fe\n", ""},
		{unified, "0::/../outside\n", ""}, // of a process that is outside its cgroup namespace
		{"24 1 0:22 / /sys/fs/cgroup rw - tmpfs none rw\n", "0::/\n", ""},
		{unified, "4:memory:/x\n", ""}, // version 1 alone
	} {
		got, err := ownCgroup(strings.NewReader(test.mounts), test.cgroups)
		if got != test.want || (err != nil) != (test.want == "") || err != nil && !errors.Is(err, ErrNoCgroup) {
			t.Errorf("%q in\n%s: %q, %v, want %q", test.cgroups, test.mounts, got, err, test.want)
		}
	}
}

// TestCheckCgroup refuses directories of other file systems, and missing ones.
func TestCheckCgroup(t *testing.T) {
	for _, dir := range []string{t.TempDir(), "/proc", "/no/such/directory"} {
		if err := CheckCgroup(dir); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
