package main

import (
	"errors"
	"strings"
	"unicode"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// flagErrors returns a lab's error with the command's flags instead of keys of a fabric and options of the lab.
func flagErrors(err error) error {
	if err == nil {
		return nil
	}
	if exit := (*cli.Error)(nil); errors.As(err, &exit) {
		with := *exit
		with.Err = flagErrors(exit.Err)
		return &with
	}
	var problems topo.Problems
	if !errors.As(err, &problems) {
		return backend.Named(err, flagOf)
	}
	var lines []string
	for _, p := range problems {
		if p.Key != "" {
			p.Key = "--" + strings.ReplaceAll(p.Key, "_", "-")
		}
		lines = append(lines, p.Error())
	}
	return errors.New(strings.Join(lines, "\n"))
}

// flagOf returns the flag for an option of a lab, such as --memory-plane for MemoryPlane.
func flagOf(field string) string {
	if field == "Cleanup" {
		return "fared lab --netns --cleanup"
	}
	var b strings.Builder
	b.WriteString("-")
	for _, r := range field {
		if unicode.IsUpper(r) {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
