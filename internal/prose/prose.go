package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/parser"
	"go/scanner"
	"go/token"
	"io"
	"path"
	"regexp"
	"strings"
)

// text is the prose of a file.
type text struct {
	file  string
	lines []line
}

// line is the prose of one line, 1 for the first.
type line struct {
	number int
	prose  string
}

// habit is a word or a turn of phrase, and how often it may occur.
type habit struct {
	name    string
	pattern *regexp.Regexp
	limit   float64 // occurrences per 1,000 words
}

// habits have twice the frequency measured over 120,422 words of comments of corebgp, etcd raft, mdlayher ndp and netlink, gribigo, cilium/ebpf and
// MetalLB as their limits.
var habits = []habit{
	{"what", words(`what`), 0.6},
	{"say", words(`says?|said|saying`), 0.12},
	{"tell", words(`tells?|told|telling`), 0.38},
	{"nobody", words(`nobody|somebody|anybody|everybody`), 0.02},
	{"beside", words(`beside|anew|knock(s|ed)?|but for`), 0.04},
	{"own", words(`of (its|their|his) own|any more`), 0.06},
}

func words(alternatives string) *regexp.Regexp {
	return regexp.MustCompile(`(?i)\b(?:` + alternatives + `)\b`)
}

func habitNamed(name string) *habit {
	for i := range habits {
		if habits[i].name == name {
			return &habits[i]
		}
	}
	return nil
}

func names() string {
	var out []string
	for _, h := range habits {
		out = append(out, h.name)
	}
	return strings.Join(out, ", ")
}

// count returns how often a habit occurs in a text.
func (h *habit) count(t text) (n int) {
	for _, l := range t.lines {
		n += len(h.pattern.FindAllString(l.prose, -1))
	}
	return n
}

// places returns the lines where a habit occurs, as "file:line: prose".
func (h *habit) places(t text) (out []string) {
	for _, l := range t.lines {
		if h.pattern.MatchString(l.prose) {
			out = append(out, fmt.Sprintf("%s:%d: %s", t.file, l.number, strings.TrimSpace(l.prose)))
		}
	}
	return out
}

var word = regexp.MustCompile(`[A-Za-z][A-Za-z'-]*`)

// report writes the frequency of each habit, and reports whether all are within their limits; true without judge.
func report(w io.Writer, texts []text, judge bool) bool {
	total := 0
	for _, t := range texts {
		for _, l := range t.lines {
			total += len(word.FindAllString(l.prose, -1))
		}
	}
	good := true
	fmt.Fprintf(w, "prose: %d words in %d files, occurrences per 1,000 words\n", total, len(texts))
	for i := range habits {
		h := &habits[i]
		n := 0
		for _, t := range texts {
			n += h.count(t)
		}
		rate, verdict := 1000*float64(n)/float64(max(total, 1)), ""
		if judge && rate > h.limit {
			good, verdict = false, "  too frequent: go run ./internal/prose -list "+h.name
		}
		fmt.Fprintf(w, "  %-8s %6d %8.2f  limit %.2f%s\n", h.name, n, rate, h.limit, verdict)
	}
	return good
}

// extractorOf returns the function that finds the prose in a file, nil for files without prose of ours. The change log tells the past, as it was said.
func extractorOf(file string) func([]byte) ([]line, error) {
	switch base := path.Base(file); {
	case strings.Contains(file, "testdata/"), strings.HasSuffix(base, "_test.go"), base == "CHANGELOG.md":
		return nil
	case strings.HasSuffix(base, ".go"):
		return goComments
	case strings.HasSuffix(base, ".proto"):
		return protoComments
	case strings.HasSuffix(base, ".md"):
		return markdown
	}
	return nil
}

var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// goComments returns the comments of a Go file without directives, none of a generated file.
func goComments(content []byte) ([]line, error) {
	if generated.Match(content) {
		return nil, nil
	}
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, "", content, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		if list := (scanner.ErrorList)(nil); errors.As(err, &list) && len(list) > 0 {
			return nil, list[0]
		}
		return nil, err
	}
	var out []line
	for _, group := range f.Comments {
		for _, c := range group.List {
			if strings.HasPrefix(c.Text, "//go:") || strings.HasPrefix(c.Text, "//lint:") {
				continue
			}
			first := files.Position(c.Pos()).Line
			for i, s := range strings.Split(c.Text, "\n") {
				out = append(out, line{first + i, strings.Trim(s, "/* \t")})
			}
		}
	}
	return out, nil
}

// protoComments returns what follows // in each line.
func protoComments(content []byte) ([]line, error) {
	var out []line
	for i, s := range strings.Split(string(content), "\n") {
		if _, comment, ok := strings.Cut(s, "//"); ok {
			out = append(out, line{i + 1, comment})
		}
	}
	return out, nil
}

var inlineCode = regexp.MustCompile("`[^`]*`")

// markdown returns the lines outside of code.
func markdown(content []byte) ([]line, error) {
	var out []line
	fenced := false
	for i, s := range bytes.Split(content, []byte("\n")) {
		if bytes.HasPrefix(bytes.TrimSpace(s), []byte("```")) {
			fenced = !fenced
			continue
		}
		if !fenced {
			out = append(out, line{i + 1, inlineCode.ReplaceAllString(string(s), "")})
		}
	}
	return out, nil
}
