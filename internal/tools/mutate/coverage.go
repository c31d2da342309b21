package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// test is a test of a package, with its duration and its coverage.
type test struct {
	Name   string
	Took   time.Duration
	blocks []block
}

// block is covered code from one position to another.
type block struct {
	file                             string // base name
	fromLine, fromCol, toLine, toCol int
}

func (b *block) holds(file string, line, col int) bool {
	return b.file == file && (line > b.fromLine || line == b.fromLine && col >= b.fromCol) &&
		(line < b.toLine || line == b.toLine && col <= b.toCol)
}

// readProfile returns the covered blocks of a coverage profile.
func readProfile(path string) (blocks []block, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, rest, ok := strings.Cut(lines.Text(), ":")
		if !ok || name == "mode" {
			continue
		}
		b := block{file: filepath.Base(name)}
		var statements, ran int
		if _, err := fmt.Sscanf(rest, "%d.%d,%d.%d %d %d", &b.fromLine, &b.fromCol, &b.toLine, &b.toCol, &statements, &ran); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", path, lines.Text(), err)
		}
		if ran > 0 {
			blocks = append(blocks, b)
		}
	}
	return blocks, nil
}

// reaching returns the tests that run a mutant's code, in the given order.
func reaching(tests []test, m *mutant) (names []test) {
	file := filepath.Base(m.File)
	for _, t := range tests {
		for i := range t.blocks {
			if t.blocks[i].holds(file, m.atLine, m.atCol) {
				names = append(names, t)
				break
			}
		}
	}
	return names
}
