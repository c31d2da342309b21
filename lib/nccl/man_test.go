package nccl

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestManPages checks that the pages name every environment variable of the plugin and every option of nccl-net-check,
// and no others.
func TestManPages(t *testing.T) {
	text := func(pattern string) string {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		var all strings.Builder
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
		}
		return all.String()
	}
	set := func(names []string) map[string]bool {
		out := map[string]bool{}
		for _, n := range names {
			out[n] = true
		}
		return out
	}
	same := func(what string, code, page map[string]bool) {
		t.Helper()
		if len(code) < 5 {
			t.Errorf("%s: found only %v in the sources", what, code)
		}
		for n := range code {
			if !page[n] {
				t.Errorf("%s %s is not in its page", what, n)
			}
		}
		for n := range page {
			if !code[n] {
				t.Errorf("the page has %s %s, the sources do not", what, n)
			}
		}
	}
	variable, option := regexp.MustCompile(`FARED_[A-Z_]+`), regexp.MustCompile(`--[a-z]+`)
	var read []string
	for _, m := range regexp.MustCompile(`(?:getenv|number|choice)\("(FARED_[A-Z_]+)"`).FindAllStringSubmatch(text("src/*.c"), -1) {
		read = append(read, m[1])
	}
	same("variable", set(read), set(variable.FindAllString(text("libnccl-net-fared.7"), -1)))
	usage := regexp.MustCompile("(?s)usage\\[\\] =.*?\";\n").FindString(text("check/main.c"))
	same("option", set(option.FindAllString(usage, -1)), set(option.FindAllString(strings.ReplaceAll(text("nccl-net-check.1"), `\-`, "-"), -1)))
}
