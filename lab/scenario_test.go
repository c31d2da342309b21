package lab

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/lab/judge"
)

func checkConfig(f File) error {
	_, err := config.Parse(f.Name, []byte(f.Text))
	return err
}

// TestParseErrors verifies that every mistake of a script is reported at once, each with its line.
func TestParseErrors(t *testing.T) {
	scripts, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range scripts {
		t.Run(filepath.Base(path), func(t *testing.T) {
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			s, err := Parse(filepath.Base(path), f)
			if err == nil {
				t.Fatalf("accepted: %+v", s)
			}
			want, rerr := os.ReadFile(strings.TrimSuffix(path, ".txt") + ".want")
			if rerr != nil {
				t.Fatal(rerr)
			}
			if got := err.Error() + "\n"; got != string(want) {
				t.Errorf("got\n%swant\n%s", got, want)
			}
		})
	}
}

func TestParse(t *testing.T) {
	s, err := Parse("story", strings.NewReader("scenario a title # comment\n\nstep one\n cut server1 p0.0\n show server1 -> server2\n expect * -> server2 2:2:1:2\n moved 3\nstep two\n"))
	if err != nil {
		t.Fatal(err)
	}
	if s.Title != "a title" || len(s.Steps) != 2 || s.Steps[1].Moved != -1 {
		t.Fatalf("%+v", s)
	}
	one := s.Steps[0]
	if one.Text != "one" || one.Moved != 3 || one.Source != "server1" || one.Destination != "server2" ||
		len(one.Actions) != 1 || one.Actions[0].Line != 4 || judge.Ratio(one.Expect[0].Weights) != "2:2:1:2" || one.Expect[0].Line != 6 {
		t.Fatalf("%+v", one)
	}
}

func TestLoadNames(t *testing.T) {
	if _, err := Load("flood", Options{}); err == nil || !strings.Contains(err.Error(), `no scenario "flood": use none, sub-cable, port, gpu, leaf, two-planes, recovery, drain, maintenance, flap, frozen, blackhole, reboot, crash or all`) {
		t.Errorf("%v", err)
	}
}

// FuzzParse verifies that reading any script returns either a scenario with steps or an error that names the script.
func FuzzParse(f *testing.F) {
	for _, name := range Names() {
		text, err := scenarioFiles.ReadFile("scenarios/" + name + ".txt")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add("step x\nexpect * -> * 1:2:99999999999\nmoved -1\ndrain\x00")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse("script", strings.NewReader(text))
		if (s == nil) == (err == nil) {
			t.Fatalf("%v, %v", s, err)
		}
		if err != nil {
			for _, line := range strings.Split(err.Error(), "\n") {
				if !strings.HasPrefix(line, "script:") {
					t.Fatalf("an error without a place: %q", line)
				}
			}
			return
		}
		if len(s.Steps) == 0 {
			t.Fatal("no steps, no error")
		}
		for _, step := range s.Steps {
			for _, a := range step.Actions {
				if len(a.Args) != len(strings.Fields(actionArgs[a.Verb])) || a.Line < 1 {
					t.Fatalf("%+v", a)
				}
			}
		}
	})
}
