package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/fare"
)

// Levels of a health report and of its findings, from best to worst.
const (
	levelHealthy  = "healthy"  // everything that is configured works
	levelDegraded = "degraded" // traffic goes on with less: an object is down, unprotected or misconfigured, or a leaf's routes or bandwidths do not count
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
			return nil, cli.Usage(fmt.Errorf("--expect %q: %q is not an expectation", text, word),
				"write KIND=NUMBER or KIND=all, with the kinds "+strings.Join(expectedKinds, ", "))
		}
		out = append(out, x)
	}
	return out, nil
}

func healthCommand(e *cli.Env) *cobra.Command {
	var expect string
	c := cli.ReadFlags(e, &cobra.Command{
		Use: "health", Short: "Judge whether this server's planes are fit for jobs; exit 0, or 1 with the reasons", Args: cli.NoArgs,
		Long: `Judges this server by the running daemon: for Slurm's HealthCheckProgram, node-problem-detector
and probes of Kubernetes (/usr/share/doc/fared/operations/health.md has their configurations).

  healthy     exit 0: all that is configured works
  degraded    exit 0: traffic goes on with less; a plane or a session is down, BFD is down on
              all established sessions of a plane, a sub-port is out for a reason that does not
              pass by itself, or a leaf advertises invalid bandwidths
  unhealthy   exit 1: an expectation is not met; or packets go wrong on a plane (probes of slots are
              lost, or leave or arrive by another), the daemon still starts, no plane is up, no
              session established, no destination known to a server or none reachable, the data
              plane is not connected, damaged or refuses objects, or the slot table is not
              published

A note is no failure: it names what an upgrade will interrupt, BFD that no leaf has, and planes
that no packet proves because no peer answers probes.

--expect states what jobs need: planes=4, sessions=8, destinations=127, or all for every one that
is configured or known. destinations=0 is for the only server of a fabric. Drained planes do not
count as up. Exit code 3: no daemon answers; the kernel may still forward by the last weights.`,
		Example: "  fared health\n  fared health --expect planes=4,sessions=8\n  fared health --expect planes=all -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			expectations, err := parseExpectations(expect)
			if err != nil {
				return err
			}
			report, err := askHealth(c.Context(), e, expectations)
			if err != nil {
				return err
			}
			return showHealth(e, report)
		},
	})
	c.Flags().StringVar(&expect, "expect", "", "what has to work, such as planes=4,sessions=8")
	return c
}

func showHealth(e *cli.Env, r *healthReport) error {
	var err error
	if e.Output == "table" {
		w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
		cli.Row(w, strings.ToUpper(r.State), fmt.Sprintf("%s planes up, %s sessions established, %s destinations reachable",
			r.Planes, r.Sessions, r.Destinations))
		for _, f := range r.Findings {
			cli.Row(w, f.Level, f.What)
			cli.Row(w, "", f.Remedy)
		}
		err = w.Flush()
	} else {
		var compact []byte
		if compact, err = json.Marshal(r); err == nil {
			err = cli.PrintJSON(e.Out, e.Output, compact)
		}
	}
	if err == nil && r.State == levelUnhealthy {
		err = cli.Failed(fmt.Errorf("the server is unhealthy: %s", r.worst()), "'fared status', 'fared planes' and 'fared sessions' have the details")
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
			down = append(down, p.Plane+" is down"+firstReason(p.SubPorts))
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
		r.add(levelDegraded, st.DrainsError, "see /usr/share/doc/fared/operations/drain.md")
	}
	r.judgeTally("planes", "up", r.Planes, down, expectations, "'fared planes' has the reasons")
	r.judgeTally("sessions", "established", r.Sessions, waiting(sessions), expectations, "'fared sessions' has the reasons")
	r.judgeBFD(sessions)
	r.judgeSubPorts(planes)
	r.judgeTally("destinations", "reachable", r.Destinations, nil, expectations, "'fared weights' has the reasons; a destination that no leaf advertises is not known")
	expected := slices.ContainsFunc(expectations, func(x expectation) bool { return x.kind == "destinations" })
	if st.Role == fare.RoleServer.String() && st.Converged && st.Destinations == 0 && st.SessionsEstablished > 0 && !expected {
		r.add(levelUnhealthy, "no destination is known: no leaf sends a route that this server accepts",
			"the faults here and 'fared sessions' have the reasons; a leaf of FRR sends and accepts nothing without a policy (no bgp ebgp-requires-policy); --expect destinations=0 for the only server of a fabric")
	}
	r.judgeFaults(st.Faults)
	r.judgeProof(st.Proof)
	if st.WithdrawnByRestart {
		r.add(levelNote, "a restart of fared, as in an upgrade, makes leaves withdraw this server's loopbacks: nothing can be sent to it meanwhile",
			"set bgp.restart_time: 60s where leaves keep routes, as FRR and BIRD do; its price is in /usr/share/doc/fared/operations/upgrade.md")
	}
	order := []string{levelUnhealthy, levelDegraded, levelNote}
	slices.SortStableFunc(r.Findings, func(a, b finding) int { return slices.Index(order, a.Level) - slices.Index(order, b.Level) })
	return r
}

// waiting returns the reason of the first session that is not established, if any has one.
func waiting(sessions []*farev1.Session) []string {
	for _, s := range sessions {
		if s.Reason != "" && !s.Established() {
			return []string{s.Name + ": " + s.Reason}
		}
	}
	return nil
}

// firstReason returns why the first sub-port with a reason does not count, in parentheses.
func firstReason(subPorts []*farev1.SubPort) string {
	for _, sp := range subPorts {
		if sp.Reason != "" {
			return fmt.Sprintf(" (%s: %s)", sp.Device, sp.Reason)
		}
	}
	return ""
}

// bfdPatience is the time for which BFD of an established session may be down: leaves begin it up to 2 s after BGP, and
// restart it within 6 s (docs/operations/bfd.md).
const bfdPatience = 10 * time.Second

// judgeBFD adds a finding for each plane whose established sessions have BFD, and none of them BFD that is up. If BFD
// is up on no session of the server, and none has discarded a packet of BFD, its leaves have none, which is a choice: a
// note. Sockets that could not be opened are a fault of this server in any case.
func (r *healthReport) judgeBFD(sessions []*farev1.Session) {
	var planes []string
	down := map[string][]*farev1.Session{} // by plane: established sessions, if BFD protects none
	protected := map[string]bool{}
	anywhere := false
	for _, s := range sessions {
		reason, _ := bfdDropped(s)
		anywhere = anywhere || reason != ""
		switch {
		case s.BfdState == "" || !s.Established():
		case s.BfdState == "up" || time.Duration(s.StateAgeNs) < bfdPatience:
			protected[s.Plane], anywhere = true, anywhere || s.BfdState == "up"
		default:
			if down[s.Plane] == nil {
				planes = append(planes, s.Plane)
			}
			down[s.Plane] = append(down[s.Plane], s)
		}
	}
	planes = slices.DeleteFunc(planes, func(p string) bool { return protected[p] })
	var silent []string
	for _, p := range planes {
		list := down[p]
		s := slices.MaxFunc(list, func(a, b *farev1.Session) int { return cmp.Compare(bfdRank(a), bfdRank(b)) })
		if s.BfdState != "failed" && !anywhere {
			silent = append(silent, p)
			continue
		}
		remedy := "start BFD at the leaf (FRR: neighbor X bfd, and bfdd; 'show bfd peers' there), and accept UDP port 3784: 'fared sessions --plane " + p + " -o json' counts discarded packets"
		if s.BfdState == "failed" {
			remedy = "end the other BFD daemon on UDP port 3784 ('ss -lunp sport = :3784'): 'fared watch --events --recent 1000' has the error"
		}
		r.add(levelDegraded, fmt.Sprintf("BFD is up on no session of plane %s, although %s: %s: %s; only bgp.hold_time detects a silent leaf",
			p, cli.Several(len(list), "session")+" established", s.Name, bfdCause(s)), remedy)
	}
	if len(silent) > 0 {
		s := down[silent[0]][0]
		r.add(levelNote, fmt.Sprintf("no leaf has BFD (planes %s; %s: %s): only bgp.hold_time detects a silent leaf", strings.Join(silent, ", "), s.Name, bfdCause(s)),
			"start BFD at the leaves (/usr/share/doc/fared/operations/bfd.md), or set bfd.interval: 0s; 'fared sessions' shows BFD")
	}
}

// bfdCause describes why BFD of a session is not up.
func bfdCause(s *farev1.Session) string {
	if s.BfdState == "failed" {
		return "its sockets could not be opened"
	}
	if reason, n := bfdDropped(s); reason != "" {
		return fmt.Sprintf("%s, %s discarded as bfd_%s", s.BfdState, cli.Several(int(n), "packet"), reason)
	}
	return s.BfdState + ", the leaf does not answer"
}

// bfdDropped returns the first reason for which packets of BFD were discarded, with their number; "" if none was.
func bfdDropped(s *farev1.Session) (reason string, n uint64) {
	for _, c := range s.Counters {
		if reason, ok := strings.CutPrefix(c.Name, `guard_dropped{reason="bfd_`); ok && c.Value > 0 {
			return strings.TrimSuffix(reason, `"}`), c.Value
		}
	}
	return "", 0
}

// bfdRank orders sessions by how much their BFD explains: sockets that could not be opened, then discarded packets.
func bfdRank(s *farev1.Session) int {
	if s.BfdState == "failed" {
		return 2
	}
	if reason, _ := bfdDropped(s); reason != "" {
		return 1
	}
	return 0
}

// judgeSubPorts adds a finding for each sub-port that is out until an operator acts.
func (r *healthReport) judgeSubPorts(planes []*farev1.Plane) {
	for _, p := range planes {
		for _, sp := range p.SubPorts {
			if !sp.Persistent || sp.Drained || sp.Draining {
				continue
			}
			remedy := "correct device and netns of the sub-port in the configuration, or create them ('ip -br link', 'ip netns list'); fared uses the device once it exists"
			switch {
			case strings.HasPrefix(sp.Reason, "speed unknown"):
				remedy = "set speed of the sub-port in the configuration, then 'fared reload'"
			case sp.Reason == "administratively down":
				remedy = "'ip link set " + sp.Device + " up'"
			}
			r.add(levelDegraded, fmt.Sprintf("sub-port %s of plane %s is out (session %s): %s", sp.Device, p.Plane, cli.Dash(strings.Join(sp.Sessions, ", ")), sp.Reason), remedy)
		}
	}
}

// judgeFaults adds a finding for each kind of fault, with one of its faults: a wrong sum or scale first, because it
// changes weights.
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
		r.add(level, fmt.Sprintf("%s of leaves, such as %s of session %s: %s", cli.Several(len(of[kind]), "fault"), f.Kind, f.Session, f.Reason), f.Remedy)
	}
}

// judgeProof adds a finding for each sub-port or plane by which packets go wrong. Without a plane it may be the port of
// proofs alone that a firewall of the peer drops.
func (r *healthReport) judgeProof(p *farev1.ProofStatus) {
	if p == nil {
		return
	}
	for _, f := range p.Findings {
		text := f.Text
		if f.Cause != "" {
			text += "; " + f.Cause
		}
		level := levelUnhealthy
		if f.Plane == "" {
			level = levelDegraded
		}
		r.add(level, text, f.Remedy)
	}
	switch {
	case p.Error != "":
		r.add(levelDegraded, "no packet proves the planes: "+p.Error, "end the other program, or choose another proof.port at all servers")
	case p.Inactive == "" && p.Answering == 0 && p.Destinations > 0:
		r.add(levelNote, fmt.Sprintf("no packet proves the planes: none of %s answers probes", cli.Several(int(p.Destinations), "destination")),
			fmt.Sprintf("run fared with proof.enabled at the peers, and accept UDP port %d in firewalls", p.Port))
	}
}

// judgeTally adds a finding if objects of a kind are not in the state that counts. None at all, and less than expected,
// is unhealthy.
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
		r.add(levelUnhealthy, "the data plane at "+dp.Address+" is not connected: the kernel forwards by its last weights", "is 'fared dataplane' running? "+cli.Dash(dp.LastError))
	}
	if dp.Damage != "" {
		r.add(levelUnhealthy, "the data plane is damaged: "+dp.Damage, "find the program that changes the kernel's objects; the agent repairs its own ones alone")
	}
	for _, x := range dp.Limitations {
		r.add(levelDegraded, x.Text, x.Remedy)
	}
	if dp.Refused > 0 {
		r.add(levelUnhealthy, cli.Several(int(dp.Refused), "object")+" refused by the data plane", "'fared weights' and 'fared watch --events' show the reasons")
	}
}
