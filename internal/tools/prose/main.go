// Command prose counts habits of language in comments and documents, and fails when one is more frequent than its
// limit.
//
//	go run ./internal/tools/prose [-list WORD] [PATH]...
//
// It reads the comments of Go, C and protobuf files, of shell scripts and of Python with its docstrings, and Markdown
// without code, of the files that git knows under the paths. Generated files, test data and tests in Go are left out
// (default: the whole repository). Limits are occurrences per 1,000 words of the whole; with paths the table is shown
// without judgment. -list prints each place of a habit. Lines of comments of more than 120 columns fail, too, those of
// tests in Go included.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strings"
)

func main() {
	list := flag.String("list", "", "print each `habit`'s places: "+names())
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: prose [-list HABIT] [PATH]...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if *list != "" && habitNamed(*list) == nil {
		fmt.Fprintf(os.Stderr, "prose: no habit %q: %s\n", *list, names())
		os.Exit(2)
	}
	texts, tooWide, err := read(flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	}
	if *list != "" {
		for _, text := range texts {
			for _, place := range habitNamed(*list).places(text) {
				fmt.Println(place)
			}
		}
		return
	}
	good := report(os.Stdout, texts, flag.NArg() == 0)
	for _, place := range tooWide {
		fmt.Printf("%s: a comment of more than %d columns\n", place, widest)
	}
	if !good || len(tooWide) > 0 {
		os.Exit(1)
	}
}

// read returns the prose of the files that git knows under paths, and the lines of comments that are too wide.
func read(paths []string) (texts []text, tooWide []string, err error) {
	out, err := exec.Command("git", append([]string{"ls-files", "-co", "--exclude-standard", "--"}, paths...)...).Output()
	if err != nil {
		return nil, nil, fmt.Errorf("git ls-files: %w", err)
	}
	for _, file := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		extract, ext := extractorOf(file), path.Ext(file)
		if extract == nil && ext != ".go" {
			continue
		}
		content, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // removed, and not committed yet
		}
		if err != nil {
			return nil, nil, err
		}
		if tooWide = append(tooWide, wide(file, content)...); extract == nil {
			continue
		}
		lines, err := extract(content)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", file, err)
		}
		texts = append(texts, text{file, lines})
	}
	if len(texts) == 0 {
		return nil, nil, fmt.Errorf("no prose in %s", strings.Join(paths, " "))
	}
	return texts, tooWide, nil
}
