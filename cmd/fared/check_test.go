package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

// TestCheckPrintsLinesForPrograms checks that each error, including the first, is a line in the format of
// docs/configuration.md, and that no line begins with "fared: ".
func TestCheckPrintsLinesForPrograms(t *testing.T) {
	form := regexp.MustCompile(`^(.+):(\d+):(\d+): \S+: .+, .+$`)
	good, err := os.ReadFile("../../examples/server-8gpu.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][]string{
		"one error":  {"as: 4200000001", "as: none"},
		"two errors": {"as: 4200000001\n", "as: none\nrole2: x\n"},
	} {
		file := filepath.Join(t.TempDir(), "fared.yaml")
		text := strings.Replace(string(good), change[0], change[1], 1)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		o := fared(t, "check", "--config", file)
		lines := strings.Split(strings.TrimSuffix(o.Err, "\n"), "\n")
		n := map[string]int{"one error": 1, "two errors": 2}[name]
		if o.Code != cli.ExitUsage || len(lines) != n+1 || strings.Contains("\n"+o.Err, "\nfared: ") || !explains(o.Err) {
			t.Fatalf("%s: exit %d\n%s", name, o.Code, o.Err)
		}
		for _, line := range lines[:n] {
			if m := form.FindStringSubmatch(line); m == nil || m[1] != file {
				t.Errorf("%s: line %q is not file:line:column: path: what, remedy", name, line)
			}
		}
	}
}

// TestCheckReadsTheStandardInput checks that "-" is the standard input, with its name in messages, and that a file may
// be named without a flag.
func TestCheckReadsTheStandardInput(t *testing.T) {
	const file = "testdata/server.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	check := func(in string, args ...string) clitest.Outcome {
		var out, errOut bytes.Buffer
		code := execute(t.Context(), append([]string{"check"}, args...), strings.NewReader(in), &out, &errOut)
		return clitest.Outcome{Code: code, Out: out.String(), Err: errOut.String()}
	}
	want := must(t, "check", "--config", file)
	if o := check(string(text), "-"); o.Code != cli.ExitOK || o.Err != "" || o.Out != strings.Replace(want, file, "<stdin>", 1) {
		t.Errorf("standard input: %+v, want %q", o, want)
	}
	if o := check("as: none\n", "-"); o.Code != cli.ExitUsage || !strings.Contains(o.Err, "<stdin>:1:5: as: ") {
		t.Errorf("a broken standard input: %+v", o)
	}
	if got := must(t, "check", file); got != want {
		t.Errorf("check FILE prints %q, want %q", got, want)
	}
	refused(t, cli.ExitUsage, "check", file, file)
	refused(t, cli.ExitUsage, "check", file, "--config", file)
}

// TestCheckForPrograms checks that the JSON of a broken file has the errors that the standard error has as lines, and
// that of a valid one its parts.
func TestCheckForPrograms(t *testing.T) {
	read := func(o clitest.Outcome) (r checked) {
		t.Helper()
		if err := json.Unmarshal([]byte(o.Out), &r); err != nil {
			t.Fatalf("%v: %q", err, o.Out)
		}
		return r
	}
	o := fared(t, "check", "testdata/broken.yaml", "-o", "json")
	r := read(o)
	lines := strings.Split(o.Err, "\n")
	if o.Code != cli.ExitUsage || r.Valid || len(r.Errors) != 8 || r.Role != "" {
		t.Fatalf("exit %d, %+v", o.Code, r)
	}
	for i, x := range r.Errors {
		if line := x.File + ":" + strconv.Itoa(x.Line) + ":" + strconv.Itoa(x.Column) + ": " + x.Path + ": " + x.Message + ", " + x.Remedy; line != lines[i] {
			t.Errorf("error %d is %q, and the line %q", i, line, lines[i])
		}
	}
	o = fared(t, "check", "testdata/none.yaml", "-o", "json")
	if r := read(o); o.Code != cli.ExitUsage || r.Valid || len(r.Errors) != 1 || r.Errors[0].Remedy == "" {
		t.Errorf("no file: exit %d, %+v", o.Code, r)
	}
	o = fared(t, "check", "../../examples/server-8gpu-own-ports.yaml", "-o", "json")
	if r := read(o); o.Code != cli.ExitOK || !r.Valid || r.Role != "server" || r.Planes != 4 || r.SourceGroups != 8 || len(r.Errors) != 0 {
		t.Errorf("a valid file: exit %d, %+v", o.Code, r)
	}
	if o := fared(t, "check", "testdata/server.yaml", "-o", "yaml"); !strings.Contains(o.Out, "valid: true\n") {
		t.Errorf("YAML: %q", o.Out)
	}
}

// TestCheckHostReadsAsCheck checks that check --host reads the standard input, and answers mistakes of the file and of
// an inside data plane's flags as check does.
func TestCheckHostReadsAsCheck(t *testing.T) {
	text, err := os.ReadFile("testdata/server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	inside := func(flags string) string {
		return strings.Replace(string(text), `{address: "memory:"}`, `{address: "inside:", flags: [`+flags+`]}`, 1)
	}
	for name, in := range map[string]string{
		"a mistake":     "as: none\n",
		"inside, flags": inside("--no-such-flag"),
		"inside, fine":  inside(""),
		"valid":         string(text),
	} {
		for _, form := range []string{"table", "json"} {
			check := func(args ...string) clitest.Outcome {
				var out, errOut bytes.Buffer
				code := execute(t.Context(), append(args, "-o", form), strings.NewReader(in), &out, &errOut)
				return clitest.Outcome{Code: code, Out: out.String(), Err: errOut.String()}
			}
			alone, host := check("check", "-"), check("check", "--host", "-")
			switch {
			case alone.Code != cli.ExitOK && host != alone:
				t.Errorf("%s, %s: check --host answers %+v, and check %+v", name, form, host, alone)
			case alone.Code == cli.ExitOK && (!strings.Contains(host.Out, "stdin") || host.Code == cli.ExitUsage):
				t.Errorf("%s, %s: check --host answers %+v", name, form, host)
			case (alone.Code == cli.ExitOK) != (name == "valid" || name == "inside, fine"):
				t.Errorf("%s, %s: check answers %+v", name, form, alone)
			}
		}
	}
}
