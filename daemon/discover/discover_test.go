package discover

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon/config"
)

var update = flag.Bool("update", false, "rewrite testdata/*.txt")

// scenario is a machine in testdata, with the flags of the operator.
type scenario struct {
	Machine `yaml:",inline"`
	Options Options `yaml:"options"`
}

// TestGolden compares the configurations of the machines in testdata/*.yaml with *.txt, and requires that the parser
// accepts each of them.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d machines: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			f, err := os.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			var s scenario
			d := yaml.NewDecoder(f)
			d.KnownFields(true)
			if err := d.Decode(&s); err != nil {
				t.Fatal(err)
			}
			got := describe(t, &s)
			golden := strings.TrimSuffix(file, ".yaml") + ".txt"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(golden)
			if err != nil || got != string(want) {
				t.Errorf("%s: %v; -update rewrites it\n%s", golden, err, got)
			}
		})
	}
}

func describe(t *testing.T, s *scenario) string {
	plan, err := New(&s.Machine, s.Options)
	var b strings.Builder
	list := func(title string, lines []string) {
		for _, l := range lines {
			fmt.Fprintf(&b, "%s: %s\n", title, l)
		}
	}
	switch err := err.(type) {
	case nil:
	case *UnusableError:
		list("left out", err.LeftOut)
		return b.String() + fmt.Sprintf("error: %s\nremedy: %s\n", err, err.Remedy)
	case *OptionError:
		return fmt.Sprintf("wrong option: %s\nremedy: %s\n", err, err.Remedy)
	default:
		t.Fatal(err)
	}
	c, err := config.Parse("fared.yaml", plan.Text)
	if err != nil {
		t.Errorf("%v\n%s", err, plan.Text)
	} else {
		checkCounts(t, plan, c)
	}
	list("guessed", plan.Guesses)
	list("left out", plan.LeftOut)
	for _, l := range plan.Absent {
		fmt.Fprintln(&b, "absent:", l)
	}
	return b.String() + "\n" + string(plan.Text)
}

// checkCounts requires that the numbers of the plan are those of the parsed file.
func checkCounts(t *testing.T, plan *Plan, c *config.Config) {
	subPorts, sessions := 0, 0
	for _, p := range c.Planes {
		subPorts += len(p.SubPorts)
		for _, s := range p.SubPorts {
			sessions += len(s.Sessions)
		}
	}
	if len(c.Planes) != plan.Planes || subPorts != plan.SubPorts || sessions != plan.Sessions {
		t.Errorf("the file has %d planes, %d sub-ports and %d sessions, the plan %d, %d and %d", len(c.Planes), subPorts, sessions, plan.Planes, plan.SubPorts, plan.Sessions)
	}
	if n := strings.Count(string(plan.Text), "# guessed:"); n != len(plan.Guesses) {
		t.Errorf("%d guesses are marked in the file, %d listed", n, len(plan.Guesses))
	}
}
