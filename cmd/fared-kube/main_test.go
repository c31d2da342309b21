package main

import (
	"context"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
)

// TestRefused checks the errors of wrong command lines and places.
func TestRefused(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for line, want := range map[string]string{
		"run":                               "--node is missing",
		"run --node n --unusable-below 101": "--unusable-below 101 is no share",
		"run --node n --taint-effect Run":   `--taint-effect "Run" is not known`,
		"run --node n":                      "this is no pod",
		"hold":                              "--file is missing",
		"run n":                             "fared-kube run takes no arguments",
		"go":                                `unknown command "go"`,
	} {
		var out, errs strings.Builder
		if code := cli.Execute(context.Background(), newRoot, strings.Fields(line), strings.NewReader(""), &out, &errs); code != cli.ExitUsage || !strings.Contains(errs.String(), want) {
			t.Errorf("%s: exit code %d, %s", line, code, errs.String())
		}
	}
}
