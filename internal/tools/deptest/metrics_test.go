package deptest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestDocumentedMetrics checks that the pages name only exported metrics and functions of libfared, and that
// docs/operations/metrics.md names every exported one.
func TestDocumentedMetrics(t *testing.T) {
	const root = "../../.."
	quoted, written := regexp.MustCompile(`"(fared_[a-z_]+)"`), regexp.MustCompile(`\bfared_[a-z_]*[a-z]\b`)
	exported := map[string]bool{}
	for _, pattern := range []string{"daemon/internal/status/*.go", "dataplane/agent/*.go", "fleet/worker/*.go", "kube/*.go"} {
		for _, file := range files(t, filepath.Join(root, pattern)) {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, m := range quoted.FindAllStringSubmatch(text(t, file), -1) {
				exported[m[1]] = true
			}
		}
	}
	if len(exported) < 50 {
		t.Fatalf("only %d metrics were found in the code", len(exported))
	}
	library := text(t, filepath.Join(root, "lib/include/fared.h")) // its functions and types, and the Python module, have the same prefix
	documented := map[string]bool{}
	pages := slices.Concat(files(t, filepath.Join(root, "docs/*.md")), files(t, filepath.Join(root, "docs/operations/*.md")), files(t, filepath.Join(root, "README.md")))
	for _, page := range pages {
		for n, line := range strings.Split(text(t, page), "\n") {
			for _, name := range written.FindAllString(line, -1) {
				if !exported[name] && name != "fared_slots" && !strings.Contains(library, name+"(") && !strings.Contains(library, "struct "+name) {
					t.Errorf("%s:%d: no metric %s is exported", page, n+1, name)
				}
				if filepath.Base(page) == "metrics.md" {
					documented[name] = true
				}
			}
			if strings.Contains(line, "`..._") {
				t.Errorf("%s:%d: a metric is named in part; write the whole name", page, n+1)
			}
		}
	}
	var missing []string
	for name := range exported {
		if !documented[name] {
			missing = append(missing, name)
		}
	}
	slices.Sort(missing)
	for _, name := range missing {
		t.Errorf("docs/operations/metrics.md does not name %s", name)
	}
}

func files(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("no file matches %s (%v)", pattern, err)
	}
	return names
}

func text(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
