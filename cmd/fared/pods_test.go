package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/pods"
	"github.com/fared/fared/pods/podstest"
)

// TestImplied checks which commands a process without arguments runs.
func TestImplied(t *testing.T) {
	for _, test := range []struct {
		args, env string
		want      string
	}{
		{"", "", ""},
		{"", "CNI_COMMAND=ADD", "cni"},
		{"", "NRI_PLUGIN_NAME=fared NRI_PLUGIN_SOCKET=3", "nri"},
		{"", "NRI_PLUGIN_NAME=fared", ""},
		{"version", "CNI_COMMAND=ADD NRI_PLUGIN_NAME=fared NRI_PLUGIN_SOCKET=3", "version"},
	} {
		got := implied(strings.Fields(test.args), func(name string) string {
			for _, pair := range strings.Fields(test.env) {
				if key, value, _ := strings.Cut(pair, "="); key == name {
					return value
				}
			}
			return ""
		})
		if !slices.Equal(got, strings.Fields(test.want)) {
			t.Errorf("fared %s with %q: %q, want %q", test.args, test.env, got, test.want)
		}
	}
}

// TestNRIRefusesFlags checks the flags of `fared nri`.
func TestNRIRefusesFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"--index 7": "two digits", "--index x1": "two digits", "--wait 31s": "not from 0s to 30s", "--wait=-1s": "not from 0s to 30s", "--socket=": "--socket is empty", "--runtime unix:": "--runtime is empty", "--log-level x": "no such level",
	} {
		if text := refused(t, cli.ExitUsage, append([]string{"nri"}, strings.Fields(flags)...)...); !strings.Contains(text, want) {
			t.Errorf("fared nri %s: %s", flags, text)
		}
	}
}

// TestResumePods checks that the records of plugins are applied while an agent runs, and no longer.
func TestResumePods(t *testing.T) {
	dir := testbed.ShortDir(t)
	agent := podstest.New(t, filepath.Join(dir, "agent.sock"))
	agent.Start()
	e, err := pods.Store{Dir: pods.Folder(agent.Socket)}.Open("box", true)
	if err == nil {
		e.Record = pods.Record{ID: "box", Netns: dir, Interfaces: []pods.Interface{{IfName: "net1"}}}
		err = e.Save()
		e.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	stop, err := resumePods(context.Background(), agent.Socket, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	netnstest.Eventually(t, time.Minute, func() error { return agent.Has("box") })
	stop()
	if none, err := resumePods(context.Background(), "", nil); err != nil {
		t.Error(err)
	} else {
		none()
	}
	if _, err := os.Stat(filepath.Join(dir, "cni", "box.json")); errors.Is(err, os.ErrNotExist) {
		t.Error("the record is gone")
	}
}
