package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

const root = "../../.."

// TestFresh fails when a generated file differs from the output for the present types.
func TestFresh(t *testing.T) {
	for name, content := range generate() {
		have, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
		} else if !bytes.Equal(have, content) {
			t.Errorf("%s is stale: run go generate ./internal/slotlayout", name)
		}
	}
}

// TestDocumented checks that every field has a description and that no field has padding before it.
func TestDocumented(t *testing.T) {
	for _, r := range records {
		at := uintptr(0)
		for i := range r.of.NumField() {
			f := r.of.Field(i)
			if f.Tag.Get("doc") == "" {
				t.Errorf("%s.%s has no description", r.of.Name(), f.Name)
			}
			if f.Offset != at {
				t.Errorf("%s.%s: padding before it", r.of.Name(), f.Name)
			}
			at += f.Type.Size()
		}
		if at != r.of.Size() {
			t.Errorf("%s has padding at its end", r.of.Name())
		}
	}
}
