// Package rdmadevtest makes trees of sysfs from text files.
package rdmadevtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Tree makes a tree of sysfs from a file and returns its root. Each line has a path and its content, in which \n is the
// end of a line, or "!" for a file that cannot be read, which is absent from the tree. A line of a GID table may name
// several entries with equal content as FIRST-LAST. A line with # is a comment.
func Tree(t testing.TB, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for line := range strings.Lines(string(text)) {
		path, content, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if strings.HasPrefix(path, "#") || content == "!" {
			continue
		}
		var first, last int
		dir, base := filepath.Split(path)
		if n, _ := fmt.Sscanf(base, "%d-%d", &first, &last); n == 2 && base == fmt.Sprintf("%d-%d", first, last) {
			for i := first; i <= last; i++ {
				Write(t, root, fmt.Sprint(dir, i), content)
			}
			continue
		}
		Write(t, root, path, content)
	}
	return root
}

// Write writes a file below a root.
func Write(t testing.TB, root, path, content string) {
	t.Helper()
	path = filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(content, `\n`, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}
