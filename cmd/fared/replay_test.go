package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/daemon"
)

// testReplay replays a daemon's recording. before has the daemon's weights when it was stopped, as JSON.
func testReplay(t *testing.T, file, before string) {
	t.Helper()
	recording, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(recording, []byte("\n"))
	lines = lines[:len(lines)-1]
	if len(lines) < 10 {
		t.Fatalf("%d lines in the recording", len(lines))
	}

	// The sessions went down before the recording ended, so the last weights are those of a server without leaves.
	table := must(t, "replay", file)
	if !strings.HasPrefix(table, "DESTINATION") {
		t.Errorf("replay prints:\n%s", table)
	}
	if again := must(t, "replay", file); again != table {
		t.Errorf("a second replay differs:\n%s\n%s", table, again)
	}
	timeline := must(t, "replay", file, "--timeline")
	for _, want := range []string{"10.255.0.2/32", "session p0/p0.0", "drain of plane p0", table} {
		if !strings.Contains(timeline, want) {
			t.Errorf("the timeline has no %q:\n%s", want, timeline)
		}
	}
	o := fared(t, "replay", file, "--timeline", "-o", "json")
	if o.Code != cli.ExitOK || !json.Valid([]byte(o.Out)) || !strings.Contains(o.Err, "drain of plane p0") {
		t.Errorf("replay --timeline -o json: exit %d, standard output\n%s\nstandard error\n%s", o.Code, o.Out, o.Err)
	}

	// A replay up to the last query has the same shares and ports for the same pairs.
	want := slotsIn(t, before)
	found := false
	for n := len(lines) - 1; n > 1 && !found; n-- {
		var out, errOut bytes.Buffer
		code := execute(t.Context(), []string{"replay", "-", "-o", "json"}, bytes.NewReader(bytes.Join(lines[:n], nil)), &out, &errOut)
		if code != cli.ExitOK {
			t.Fatalf("the first %d lines: exit %d, %s", n, code, errOut.String())
		}
		found = slotsIn(t, out.String()) == want
	}
	if !found {
		t.Errorf("no point of the recording has the slots that the daemon showed:\n%s", want)
	}

	// A killed process leaves half a line, which is no error; a changed line is an error that names the line.
	play := func(lines ...[]byte) clitest.Outcome {
		path := filepath.Join(t.TempDir(), "changed.jsonl")
		if err := os.WriteFile(path, bytes.Join(lines, nil), 0o600); err != nil {
			t.Fatal(err)
		}
		return fared(t, "replay", path)
	}
	half := append(append([][]byte{}, lines...), []byte(`{"time_ns":1,"ev`))
	if o := play(half...); o.Code != cli.ExitOK || o.Out != table {
		t.Errorf("a recording that ends in half a line: exit %d\n%s%s", o.Code, o.Out, o.Err)
	}
	event := slices.IndexFunc(lines[1:], func(line []byte) bool { return bytes.Contains(line, []byte(`"reload"`)) }) + 1
	if event == 0 {
		t.Fatalf("no reload in the recording:\n%s", recording)
	}
	without := append(append([][]byte{}, lines[:event]...), lines[event+1:]...)
	changes := []struct {
		name  string
		lines [][]byte
		at    int
	}{
		{"an event is missing", without, len(without)},
		{"no JSON", replace(lines, 4, "nonsense\n"), 5},
		{"an event of no session", replace(lines, 4, `{"time_ns":1,"event":{"kind":"end-of-rib","session":99,"generation":1}}`+"\n"), 5},
		{"an unknown key", replace(lines, 2, `{"when":1}`+"\n"), 3},
		{"no header", lines[1:], 1},
		{"another digest", replace(lines, len(lines)-1, `{"digest":"00"}`+"\n"), len(lines)},
	}
	for _, c := range changes {
		o := play(c.lines...)
		if o.Code != cli.ExitFailed || o.Out != "" || !strings.Contains(o.Err, fmt.Sprintf("line %d: ", c.at)) || !explains(o.Err) {
			t.Errorf("%s: exit %d, want an error that names line %d:\n%s%s", c.name, o.Code, c.at, o.Out, o.Err)
		}
	}
}

// TestReplayEndsWithEffect checks that a replay ends with whether the last weights were in effect, by the answers of
// the data plane in the recording.
func TestReplayEndsWithEffect(t *testing.T) {
	recording, err := os.ReadFile("../../daemon/internal/core/testdata/recording-66b364c.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var changed int64 // time of the last change of weights
	if _, err := daemon.Replay(bytes.NewReader(recording), func(r daemon.Replayed) {
		if len(r.Changed) > 0 {
			changed = r.TimeNS
		}
	}); err != nil {
		t.Fatal(err)
	}
	header := bytes.IndexByte(recording, '\n') + 1
	report := func(ns int64, effect string) string {
		return fmt.Sprintf(`{"time_ns":%d,"effect":%s}`+"\n", ns, effect)
	}
	for _, c := range []struct{ before, after, row, want string }{
		{"", "", "wanted", "the recording ends without an answer of the data plane to the last change of weights"},
		{report(1, "{}"), "", "wanted", "the recording ends without an answer of the data plane to the last change of weights"},
		{"", report(changed+3200000, "{}"), "in effect", "in effect 3.2ms after the last change of weights"},
		{"", report(changed+1, "{}") + report(changed+2, `{"pending":3,"approximate":2,"refused":1,"problem":"vector 4: table full"}`), "wanted",
			"not in effect: 3 pending, 2 held approximately, 1 refused; vector 4: table full"},
		{"", report(changed+3200000, "{}") + report(changed+7e9, `{"problem":"disconnected"}`) + report(changed+8e9, `{"pending":3}`) + report(changed+9e9, "{}"), "in effect",
			"in effect 3.2ms after the last change of weights"},
		{"", report(changed+3200000, "{}") + `{"missing":2}` + "\n", "wanted", "the recording ends without an answer of the data plane to the last change of weights"},
		{"", report(changed+1, `{"damaged":true,"problem":"a rule is gone"}`), "wanted", "not in effect: damaged: a rule is gone"},
	} {
		text := string(recording[:header]) + c.before + string(recording[header:]) + c.after
		for _, format := range []string{"table", "json"} {
			var out, errOut bytes.Buffer
			if code := execute(t.Context(), []string{"replay", "-", "--timeline", "-o", format}, strings.NewReader(text), &out, &errOut); code != cli.ExitOK {
				t.Fatalf("%q: exit %d, %s", c.after, code, errOut.String())
			}
			shown, row := out.String(), "  "+c.row+"\n"
			if format == "json" {
				shown, row = errOut.String(), fmt.Sprintf(`"in_effect": %t`, c.row == "in effect")
			}
			if !strings.HasSuffix(shown, "\n"+c.want+"\n") || !strings.Contains(out.String(), row) {
				t.Errorf("%q, -o %s: want the end %q and rows %q:\n%s%s", c.after, format, c.want, row, out.String(), errOut.String())
			}
			if reported := c.before + c.after; strings.Contains(shown, "  weights ") != (reported != "") {
				t.Errorf("%q, -o %s: the timeline is\n%s", reported, format, shown)
			}
		}
	}
}

func replace(lines [][]byte, at int, with string) [][]byte {
	out := append([][]byte{}, lines...)
	out[at] = []byte(with)
	return out
}

// slotsIn returns the pairs of every destination, as text.
func slotsIn(t *testing.T, text string) string {
	t.Helper()
	var answer struct {
		Destinations []struct {
			Destination string
			Pairs       json.RawMessage
		}
	}
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	for _, d := range answer.Destinations {
		b.WriteString(d.Destination)
		if err := json.Compact(&b, d.Pairs); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}
