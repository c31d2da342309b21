package lab

import (
	"bufio"
	"embed"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// Scenario is a sequence of failures: steps in order, each with its actions and, where the script states them, its
// expectations.
type Scenario struct {
	Name  string
	Title string
	Steps []Step
}

// Step is one step of a scenario: some actions and the expectations after them.
type Step struct {
	Text    string
	Actions []Action
	// Source and Destination are the servers whose weights are shown; expectations for all pairs come from the model.
	Source, Destination string
	// Expect holds the weights that the script itself states, in plane order.
	Expect []Expectation
	// Moved is the maximum number of slots that may move; -1 means no limit. MovedPolicy restricts the limit to a
	// policy; "" means any.
	Moved       int
	MovedPolicy string
	// Lost is the maximum number of packets that may be lost, from the step's first action on, by the pairs whose
	// weights no action changes; -1 means no limit.
	Lost int
}

// Action is one line with an action: a verb and its words.
type Action struct {
	Verb string
	Args []string
	Line int
}

// Expectation states the weights between servers; "*" stands for every server.
type Expectation struct {
	Source, Destination string
	Weights             []uint32
	Line                int
}

//go:embed scenarios/*.txt
var scenarioFiles embed.FS

// Names returns the built-in scenarios in the order in which "all" runs them.
func Names() []string {
	return []string{"none", "sub-cable", "port", "gpu", "leaf", "two-planes", "recovery", "drain", "maintenance", "flap", "frozen", "blackhole", "reboot", "crash"}
}

// playable reports whether a fabric can play a built-in scenario: a fabric inside this process has no separate
// processes and packets, and in a container the processes of a node return together.
func (o Options) playable(name string) bool {
	switch name {
	case "gpu": // requires GPUs with own ports, and no overrides
		return o.GPUPorts == topo.Own && o.GPUs > 1 && o.Overrides == ""
	case "maintenance", "flap", "frozen", "blackhole":
		return o.real()
	case "reboot":
		return o.real() && (o.Transport == "" || o.Transport == Transports[0])
	case "crash":
		return o.Netns != nil
	}
	return true
}

// Load returns a built-in scenario by name, or for "all" every scenario that the fabric can play, in order.
func Load(name string, o Options) ([]*Scenario, error) {
	names := []string{name}
	if name == "all" {
		names = slices.DeleteFunc(Names(), func(name string) bool { return !o.playable(name) })
	} else if !slices.Contains(Names(), name) {
		return nil, backend.NewOptionError("no scenario %q: use %s or all, or name a script with {Script}", name, strings.Join(Names(), ", "))
	}
	var out []*Scenario
	for _, n := range names {
		f, err := scenarioFiles.Open("scenarios/" + n + ".txt")
		if err != nil {
			return nil, err
		}
		s, err := Parse(n, f)
		f.Close()
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// actionArgs holds the arguments of each verb.
var actionArgs = map[string]string{
	"cut":       "NODE PORT|PLANE",
	"mend":      "NODE PORT|PLANE",
	"flap":      "NODE PORT|PLANE TIMES PERIOD",
	"blackhole": "NODE PORT|PLANE",
	"heal":      "NODE PORT|PLANE",
	"kill":      "LEAF",
	"restart":   "LEAF",
	"freeze":    "LEAF",
	"thaw":      "LEAF",
	"poweroff":  "SERVER",
	"poweron":   "SERVER",
	"drain":     "SERVER|* plane|sub-port|leaf NAME",
	"undrain":   "SERVER|* plane|sub-port|leaf NAME",
	"crash":     "SERVER fared|dataplane|both",
	"revive":    "SERVER fared|dataplane|both",
}

// Parse reads a script. The error lists every mistake with file and line. The form is:
//
//	scenario TITLE
//	step TEXT
//	  cut server2 p2.0            one sub-port's cable; "p2" cuts the plane's whole port; "cut leaf0-1 up0" an uplink
//	  mend server2 p2.0
//	  flap server2 p2.0 5 200ms   cut and mend it five times, each state for 200 ms
//	  blackhole server2 p2.0      drop every packet in both directions, with the carrier up; "heal ..." ends it
//	  kill leaf2                  a leaf or spine fails, and all its cables go down; "restart leaf2"
//	  freeze leaf2                its processes stop, its kernel forwards; "thaw leaf2"
//	  poweroff server2            a server loses all its state; "poweron server2"
//	  drain server1 plane p2      also "sub-port p2.0", "leaf leaf2", and "*" for every server; "undrain ..."
//	  crash server1 fared         kill -9 of "fared run"; also "dataplane", "both"; "revive ..." restarts it
//	  show server1 -> server2     the pair whose weights are printed
//	  expect * -> server2 2:2:1:2 expected weights, checked in addition to the model
//	  moved 0                     maximum number of slots that may move; "moved 0 reweight" applies to that policy only
//	  lost 0                      maximum number of packets that may be lost of pairs whose weights stay
//
// Text after # is a comment.
func Parse(name string, r io.Reader) (*Scenario, error) {
	s := &Scenario{Name: name, Title: name}
	var errs []string
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := s.line(n, words); err != nil {
			errs = append(errs, fmt.Sprintf("%s:%d: %v", name, n, err))
		}
	}
	if err := lines.Err(); err != nil {
		errs = append(errs, fmt.Sprintf("%s: %v", name, err))
	}
	if len(s.Steps) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Sprintf("%s: no step: a script has at least one line \"step TEXT\"", name))
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("%s", strings.Join(errs, "\n"))
	}
	return s, nil
}

func (s *Scenario) line(n int, words []string) error {
	verb, args := words[0], words[1:]
	switch verb {
	case "scenario":
		s.Title = strings.Join(args, " ")
		return nil
	case "step":
		if len(args) == 0 {
			return fmt.Errorf("step without a text: describe the event in a few words")
		}
		s.Steps = append(s.Steps, Step{Text: strings.Join(args, " "), Moved: -1, Lost: -1})
		return nil
	}
	if len(s.Steps) == 0 {
		return fmt.Errorf("%s before the first step: begin with \"step TEXT\"", verb)
	}
	step := &s.Steps[len(s.Steps)-1]
	if usage, ok := actionArgs[verb]; ok {
		if want := len(strings.Fields(usage)); len(args) != want {
			return fmt.Errorf("%s has %d words, not %d: %s %s", verb, len(args), want, verb, usage)
		}
		step.Actions = append(step.Actions, Action{verb, args, n})
		return nil
	}
	switch verb {
	case "show":
		if len(args) != 3 || args[1] != "->" {
			return fmt.Errorf("show takes a pair: show server1 -> server2")
		}
		step.Source, step.Destination = args[0], args[2]
	case "expect":
		if len(args) != 4 || args[1] != "->" {
			return fmt.Errorf("expect takes a pair and weights: expect * -> server2 2:2:1:2")
		}
		e := Expectation{Source: args[0], Destination: args[2], Line: n}
		for _, w := range strings.Split(args[3], ":") {
			v, err := strconv.ParseUint(w, 10, 32)
			if err != nil {
				return fmt.Errorf("weight %q is not a number: weights look like 2:2:1:2", w)
			}
			e.Weights = append(e.Weights, uint32(v))
		}
		step.Expect = append(step.Expect, e)
	case "moved":
		if len(args) != 1 && (len(args) != 2 || args[1] != "reweight" && args[1] != "remap") {
			return fmt.Errorf("moved takes one number, and the policy that it applies to: moved 0, or moved 0 reweight")
		}
		v, err := strconv.Atoi(args[0])
		if err != nil || v < 0 {
			return fmt.Errorf("moved %q is not a number of slots", args[0])
		}
		step.Moved = v
		if len(args) == 2 {
			step.MovedPolicy = args[1]
		}
	case "lost":
		if len(args) != 1 {
			return fmt.Errorf("lost takes one number: lost 0")
		}
		v, err := strconv.Atoi(args[0])
		if err != nil || v < 0 {
			return fmt.Errorf("lost %q is not a number of packets", args[0])
		}
		step.Lost = v
	default:
		return fmt.Errorf("%q is not a word of a scenario: use scenario, step, cut, mend, flap, blackhole, heal, kill, restart, freeze, thaw, poweroff, poweron, drain, undrain, crash, revive, show, expect, moved and lost", verb)
	}
	return nil
}
