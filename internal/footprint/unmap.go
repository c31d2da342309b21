package footprint

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// mapping is a part of the address space that holds pages of the binary.
type mapping struct {
	begin, end uintptr
	resident   uint64 // KiB
}

// unmap removes the pages of the process's binary from the resident set. They stay in the page cache, so the next
// access costs a minor fault.
func unmap() error {
	found, err := binary()
	if err != nil {
		return err
	}
	for _, m := range found {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.begin, m.end-m.begin, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("madvise: %w", errno)
		}
	}
	return nil
}

// binary returns the mappings of the process's binary that hold pages of the file alone: those that cannot be written,
// and of which no page was written before that (relocations, breakpoints).
func binary() (found []mapping, err error) {
	name, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var m mapping
	ours := false
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := lines.Text()
		var begin, end uintptr
		var mode string
		if n, _ := fmt.Sscanf(line, "%x-%x %4s", &begin, &end, &mode); n == 3 {
			m = mapping{begin: begin, end: end}
			ours = strings.HasSuffix(line, " "+name) && strings.HasPrefix(mode, "r") && !strings.Contains(mode, "w")
			continue
		}
		var kib uint64
		switch {
		case !ours:
		case value(line, "Rss:", &kib):
			m.resident = kib
		case value(line, "Anonymous:", &kib) && kib == 0:
			found = append(found, m)
		}
	}
	return found, lines.Err()
}

// value reads a line of smaps with a key into kib, and reports whether the line has the key.
func value(line, key string, kib *uint64) bool {
	rest, ok := strings.CutPrefix(line, key)
	if !ok {
		return false
	}
	_, err := fmt.Sscan(rest, kib)
	return err == nil
}
