package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
)

// Levels of a health report and of its findings, from best to worst.
const (
	levelHealthy  = "healthy"  // everything that is configured works
	levelDegraded = "degraded" // traffic goes on with less: a plane or a session is down, or a leaf's routes or bandwidths do not count
	// levelNote is the level of a finding that is not a failure; no state has it.
	levelNote      = "note"
	levelUnhealthy = "unhealthy" // an expectation is not met, or the server's traffic cannot follow the weights
)

// finding is one reason why a server is not healthy, with its remedy.
type finding struct {
	Level  string `json:"level"`
	What   string `json:"what"`
	Remedy string `json:"remedy"`
}

// tally counts the objects that work, of those that are configured or known.
type tally struct {
	Up    int `json:"up"`
	Known int `json:"known"`
}

// healthReport is the answer of `fared health`.
type healthReport struct {
	State        string    `json:"state"`
	Planes       tally     `json:"planes"`
	Sessions     tally     `json:"sessions"`
	Destinations tally     `json:"destinations"`
	Findings     []finding `json:"findings"`
}

// expectation is the least number of objects of a kind that must work; all means every known one.
type expectation struct {
	kind  string
	least int
	all   bool
}

var expectedKinds = []string{"planes", "sessions", "destinations"}

// parseExpectations reads "planes=4,sessions=all".
func parseExpectations(text string) (out []expectation, err error) {
	if text == "" {
		return nil, nil
	}
	for word := range strings.SplitSeq(text, ",") {
		kind, value, _ := strings.Cut(strings.TrimSpace(word), "=")
		x := expectation{kind: kind, all: value == "all"}
		least, nerr := strconv.ParseUint(value, 10, 31)
		x.least = int(least)
		if !slices.Contains(expectedKinds, kind) || (nerr != nil && !x.all) {
			return nil, &exitError{exitUsage, fmt.Errorf("--expect %q: %q is not an expectation", text, word),
				"write KIND=NUMBER or KIND=all, with the kinds " + strings.Join(expectedKinds, ", ")}
		}
		out = append(out, x)
	}
	return out, nil
}

func healthCommand(e *env) *cobra.Command {
	var expect string
	c := readFlags(e, &cobra.Command{
		Use: "health", Short: "Judge whether this server's planes are fit for jobs; exit 0, or 1 with the reasons", Args: noArgs,
		Long: `Judges this server by the running daemon: for Slurm's HealthCheckProgram, node-problem-detector
and probes of Kubernetes (docs/operations/health.md has their configurations).

  healthy     exit 0: all that is configured works
  degraded    exit 0: traffic goes on with less; a plane or a session is down, or a leaf
              advertises invalid bandwidths
  unhealthy   exit 1: an expectation is not met; or the daemon still starts, no plane is up, no
              session established, no destination known to a server or none reachable, the data
              plane is not connected, damaged or refuses objects, or the slot table is not
              published

A note is no failure: it names what an upgrade will interrupt.

--expect states what jobs need: planes=4, sessions=8, destinations=127, or all for every one that
is configured or known. destinations=0 is for the only server of a fabric. Drained planes do not
count as up. Exit code 3: no daemon answers; the kernel may still forward by the last weights.`,
		Example: "  fared health\n  fared health --expect planes=4,sessions=8\n  fared health --expect planes=all -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			expectations, err := parseExpectations(expect)
			if err != nil {
				return err
			}
			report, err := e.health(c.Context(), expectations)
			if err != nil {
				return err
			}
			return e.showHealth(report)
		},
	})
	c.Flags().StringVar(&expect, "expect", "", "what has to work, such as planes=4,sessions=8")
	return c
}

func (e *env) showHealth(r *healthReport) error {
	var err error
	if e.output == "table" {
		w := tabwriter.NewWriter(e.out, 0, 0, 2, ' ', 0)
		row(w, strings.ToUpper(r.State), fmt.Sprintf("%s planes up, %s sessions established, %s destinations reachable",
			r.Planes, r.Sessions, r.Destinations))
		for _, f := range r.Findings {
			row(w, f.Level, f.What)
			row(w, "", f.Remedy)
		}
		err = w.Flush()
	} else {
		var compact []byte
		if compact, err = json.Marshal(r); err == nil {
			err = printJSON(e.out, e.output, compact)
		}
	}
	if err == nil && r.State == levelUnhealthy {
		err = &exitError{exitFailed, fmt.Errorf("the server is unhealthy: %s", r.worst()), "'fared status', 'fared planes' and 'fared sessions' have the details"}
	}
	return err
}

func (t tally) String() string { return fmt.Sprintf("%d of %d", t.Up, t.Known) }

// worst returns the first finding that makes the server unhealthy.
func (r *healthReport) worst() string {
	for _, f := range r.Findings {
		if f.Level == levelUnhealthy {
			return f.What
		}
	}
	return ""
}

func (r *healthReport) add(level, what, remedy string) {
	r.Findings = append(r.Findings, finding{level, what, remedy})
	if level == levelUnhealthy || level == levelDegraded && r.State == levelHealthy {
		r.State = level
	}
}

// judgeHealth judges a server by its daemon's answers. Findings begin with the unhealthy ones and end with notes.
func judgeHealth(st *farev1.GetStatusResponse, planes []*farev1.Plane, sessions []*farev1.Session, expectations []expectation) *healthReport {
	r := &healthReport{State: levelHealthy, Findings: []finding{},
		Sessions:     tally{int(st.SessionsEstablished), int(st.SessionsConfigured)},
		Destinations: tally{int(st.DestinationsReachable), int(st.Destinations)},
		Planes:       tally{Known: len(planes)}}
	var down []string
	for _, p := range planes {
		switch {
		case p.Drained || p.Draining:
			down = append(down, p.Plane+" is drained")
		case !p.Up:
			down = append(down, p.Plane+" is down")
		default:
			r.Planes.Up++
		}
	}
	if !st.Converged {
		r.add(levelUnhealthy, "the daemon starts: not all sessions have sent their routes", "wait until 'fared status' shows converged, some seconds")
	}
	judgeDataplane(r, st)
	if st.SlotTableError != "" {
		r.add(levelUnhealthy, "the slot table is not published: "+st.SlotTableError, "programs use the previous slots: remove the cause, fared retries each second")
	}
	if st.DrainsError != "" {
		r.add(levelDegraded, st.DrainsError, "see docs/operations/drain.md")
	}
	r.judgeTally("planes", "up", r.Planes, down, expectations, "'fared planes' has the reasons")
	r.judgeTally("sessions", "established", r.Sessions, waiting(sessions), expectations, "'fared sessions' has the reasons")
	r.judgeTally("destinations", "reachable", r.Destinations, nil, expectations, "'fared weights' has the reasons; a destination that no leaf advertises is not known")
	expected := slices.ContainsFunc(expectations, func(x expectation) bool { return x.kind == "destinations" })
	if st.Role == fare.RoleServer.String() && st.Converged && st.Destinations == 0 && st.SessionsEstablished > 0 && !expected {
		r.add(levelUnhealthy, "no destination is known: no leaf sends a route that this server accepts",
			"the faults here and 'fared sessions' have the reasons; a leaf of FRR sends and accepts nothing without a policy (no bgp ebgp-requires-policy); --expect destinations=0 for the only server of a fabric")
	}
	r.judgeFaults(st.Faults)
	if st.WithdrawnByRestart {
		r.add(levelNote, "a restart of fared, as in an upgrade, makes leaves withdraw this server's loopbacks: nothing can be sent to it meanwhile",
			"set bgp.restart_time: 60s where leaves keep routes, as FRR and BIRD do; its price is in docs/operations/upgrade.md")
	}
	order := []string{levelUnhealthy, levelDegraded, levelNote}
	slices.SortStableFunc(r.Findings, func(a, b finding) int { return slices.Index(order, a.Level) - slices.Index(order, b.Level) })
	return r
}

// waiting returns the reason of the first session that is not established, if any has one.
func waiting(sessions []*farev1.Session) []string {
	for _, s := range sessions {
		if s.Reason != "" && s.State != "established" && s.State != "draining" && s.State != "drained" {
			return []string{s.Name + ": " + s.Reason}
		}
	}
	return nil
}

// judgeFaults adds a finding for each kind of fault, with one of its faults: a wrong sum or scale first, because it changes weights.
func (r *healthReport) judgeFaults(faults []*farev1.Fault) {
	var kinds []string
	of := map[string][]*farev1.Fault{}
	for _, f := range faults {
		if of[f.Kind] == nil {
			kinds = append(kinds, f.Kind)
		}
		of[f.Kind] = append(of[f.Kind], f)
	}
	for _, kind := range kinds {
		f, level := of[kind][0], levelDegraded
		for _, x := range of[kind] {
			if x.Reason == fare.ReasonWrapped.String() || x.Reason == fare.ReasonOtherScale.String() { // the failure of a peer's cable changes no weight
				f, level = x, levelUnhealthy
				break
			}
		}
		r.add(level, fmt.Sprintf("%s of leaves, such as %s of session %s: %s", several(len(of[kind]), "fault"), f.Kind, f.Session, f.Reason), f.Remedy)
	}
}

// judgeTally adds a finding if objects of a kind are not in the state that counts. None at all, and less than expected, is unhealthy.
func (r *healthReport) judgeTally(kind, state string, have tally, missing []string, expectations []expectation, remedy string) {
	level, text := levelDegraded, fmt.Sprintf("%s %s: %s", kind, state, have)
	least := 0
	for _, x := range expectations {
		if x.kind == kind {
			least = x.least
			if x.all {
				least = max(1, have.Known)
			}
			text += fmt.Sprintf(", expected %d", least)
		}
	}
	switch {
	case have.Up < least || have.Up == 0 && have.Known > 0:
		level = levelUnhealthy
	case have.Up == have.Known:
		return
	}
	if len(missing) > 0 {
		text += "; " + strings.Join(missing, ", ")
	}
	r.add(level, text, remedy)
}

// judgeDataplane judges the data plane. A leaf without one has nothing to judge.
func judgeDataplane(r *healthReport, st *farev1.GetStatusResponse) {
	dp := st.Dataplane
	if dp == nil {
		return
	}
	if !dp.Connected {
		r.add(levelUnhealthy, "the data plane at "+dp.Address+" is not connected: the kernel forwards by its last weights", "is 'fared dataplane' running? "+dash(dp.LastError))
	}
	if dp.Damage != "" {
		r.add(levelUnhealthy, "the data plane is damaged: "+dp.Damage, "find the program that changes the kernel's objects; the agent repairs its own ones alone")
	}
	for _, x := range dp.Limitations {
		r.add(levelDegraded, x.Text, x.Remedy)
	}
	if dp.Refused > 0 {
		r.add(levelUnhealthy, several(int(dp.Refused), "object")+" refused by the data plane", "'fared weights' and 'fared watch --events' show the reasons")
	}
}
