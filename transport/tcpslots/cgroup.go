package tcpslots

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoCgroup means that no usable cgroup file system of version 2 is mounted.
var ErrNoCgroup = errors.New("no cgroup file system of version 2 is mounted")

// OwnCgroup returns the directory of the process's cgroup of version 2. The error is ErrNoCgroup or that of reading
// /proc.
func OwnCgroup() (string, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer mounts.Close()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	return ownCgroup(mounts, string(own))
}

// ownCgroup finds the directory from the content of /proc/self/mountinfo and /proc/self/cgroup (proc(5), cgroups(7)).
func ownCgroup(mounts io.Reader, cgroups string) (string, error) {
	own := ""
	for line := range strings.Lines(cgroups) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			own = path
		}
	}
	for lines := bufio.NewScanner(mounts); own != "" && lines.Scan(); {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(kind) == 0 || kind[0] != "cgroup2" {
			continue
		}
		// A mount may show a part of the hierarchy, such as that of a container.
		rest, inside := strings.CutPrefix(own, strings.TrimSuffix(unescape(fields[3]), "/"))
		if inside && (rest == "" || rest[0] == '/') && !strings.HasPrefix(rest, "/..") {
			return filepath.Join(unescape(fields[4]), rest), nil
		}
	}
	return "", ErrNoCgroup
}

// unescape decodes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// CheckCgroup returns an error unless a directory is a cgroup of version 2.
func CheckCgroup(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is not a cgroup of version 2", dir)
	}
	return nil
}
