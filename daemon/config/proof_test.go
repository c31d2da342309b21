package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestProofKeys reads keys, refuses short ones, and shows a reload by files, or without any text of the keys.
func TestProofKeys(t *testing.T) {
	dir := t.TempDir()
	key := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load := func(keys string) (*Config, error) {
		t.Helper()
		path := filepath.Join(dir, "fared.yaml")
		text := "as: 65001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nproof: {keys: " + keys + "}\nplanes:\n- name: p0\n  sub_ports:\n  - {device: eth0, sessions: [{peer: 10.0.0.0}]}\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return Load(path)
	}
	key("a", "the first key of 16")
	key("b", "the second key of 16")
	key("short", "15 bytes of key")
	one, err := load("[{key_file: a}]")
	if err != nil || len(one.Proof.Keys) != 1 || one.Proof.Keys[0].Key != "the first key of 16" {
		t.Fatalf("%v, %v", one, err)
	}
	if _, err := load("[{key_file: short}]"); err == nil || !strings.Contains(err.Error(), "holds less than 16 bytes") {
		t.Errorf("a short key: %v", err)
	}
	two, err := load("[{key_file: b}, {key_file: a}]")
	if err != nil {
		t.Fatal(err)
	}
	changes, err := Diff(one, two)
	if err != nil || len(changes) != 1 || !changes.Has(ChangeProofKeys) || !strings.Contains(changes.String(), "b, ") {
		t.Errorf("other files: %v, %v", changes, err)
	}
	key("a", "another key of 16 bytes")
	renewed, err := load("[{key_file: a}]")
	if err != nil {
		t.Fatal(err)
	}
	changes, err = Diff(one, renewed)
	if err != nil || changes.String() != "proof.keys: its keys -> other keys" {
		t.Errorf("another content: %v, %v", changes, err)
	}
	if changes, err := Diff(one, one); err != nil || len(changes) != 0 {
		t.Errorf("no change: %v, %v", changes, err)
	}
}

// TestProves lists the configurations with probes.
func TestProves(t *testing.T) {
	for text, want := range map[string]bool{
		"": true, "dataplane: {address: 'memory:'}\n": false, "proof: {enabled: false}\n": false, "dataplane: {address: 'inside:'}\n": true,
	} {
		c, err := Parse("test", []byte("as: 65001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\n"+text+"planes:\n- name: p0\n  sub_ports:\n  - {device: eth0, sessions: [{peer: 10.0.0.0}]}\n"))
		if err != nil {
			t.Fatal(err)
		}
		if c.Proves() != want {
			t.Errorf("%q: %v", text, c.Proves())
		}
	}
}
