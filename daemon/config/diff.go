package config

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/fared/fared/daemon/config/internal/model"
)

// ChangeKind is the kind of a change that a reload makes.
type ChangeKind string

// The kinds of change that a running daemon makes.
const (
	ChangeLoopbacks     ChangeKind = "loopbacks"
	ChangeDrainDelay    ChangeKind = "drain-delay"
	ChangePathBandwidth ChangeKind = "path-bandwidth" // advertise, missing, all_missing, all_zero, conflict, least_preferred, increase_hold_up
	ChangePlanes        ChangeKind = "planes"         // planes, sub-ports and sessions
	ChangeSpeed         ChangeKind = "speed"          // of a sub-port
	ChangeLinks         ChangeKind = "links"          // damping
	ChangeLogLevel      ChangeKind = "log-level"
	ChangeBFDKeys       ChangeKind = "bfd-keys"
	ChangeProof         ChangeKind = "proof" // unproved, avoid_after
	ChangeProofKeys     ChangeKind = "proof-keys"
)

// Change is one value that differs between two configurations. Old and New are in the syntax of the file, "none" when
// absent.
type Change struct {
	Kind     ChangeKind
	Path     string
	Old, New string
}

// String returns path: old -> new.
func (c Change) String() string { return fmt.Sprintf("%s: %s -> %s", c.Path, c.Old, c.New) }

// Changes are the changes of a reload, sorted by path.
type Changes []Change

// Has reports whether a kind of change is among them.
func (c Changes) Has(kind ChangeKind) bool {
	return slices.ContainsFunc(c, func(one Change) bool { return one.Kind == kind })
}

// String returns one line per change.
func (c Changes) String() string {
	lines := make([]string, len(c))
	for i := range c {
		lines[i] = c[i].String()
	}
	return strings.Join(lines, "\n")
}

// RestartError reports that two configurations differ in keys that cannot change while fared runs. No change may be
// applied then, not even the permitted ones.
type RestartError struct {
	Changes Changes // the changes that need a restart, sorted by path; Kind is ""
}

// Error lists every change.
func (e *RestartError) Error() string {
	lines := make([]string, len(e.Changes))
	for i := range e.Changes {
		lines[i] = "\n  " + e.Changes[i].String()
	}
	return "nothing was changed: these keys need a restart of fared:" + strings.Join(lines, "")
}

// Diff returns the changes that a reload makes. Equal configurations give no changes. The error is a *RestartError that
// lists every value that would need a restart; the changes are nil then.
func Diff(old, new *Config) (Changes, error) {
	var d differ
	d.structure(reflect.ValueOf(old).Elem(), reflect.ValueOf(new).Elem(), "")
	for _, list := range []Changes{d.live, d.restart} {
		slices.SortStableFunc(list, func(a, b Change) int { return cmp.Compare(a.Path, b.Path) })
	}
	if len(d.restart) > 0 {
		return nil, &RestartError{d.restart}
	}
	return d.live, nil
}

type differ struct {
	live, restart Changes
	// within means that the differences are inside planes, where all keys may change.
	within bool
}

// add records the change of a key with a kind, "" for one that needs a restart.
func (d *differ) add(c Change, kind string) {
	if kind == "" && d.within {
		kind = string(ChangePlanes)
	}
	if c.Kind = ChangeKind(kind); kind == "" {
		d.restart = append(d.restart, c)
	} else {
		d.live = append(d.live, c)
	}
}

func (d *differ) structure(old, new reflect.Value, path string) {
	for _, f := range model.Fields(old.Type()) {
		ov, nv, where := old.Field(f.Index), new.Field(f.Index), join(path, f.Key)
		switch {
		case f.Reload == string(ChangeBFDKeys):
			d.bfdKeys(ov.Interface().([]BFDKey), nv.Interface().([]BFDKey), where)
		case f.Reload == string(ChangeProofKeys):
			d.proofKeys(ov.Interface().([]ProofKey), nv.Interface().([]ProofKey), where)
		case f.Object == reflect.TypeFor[Plane]():
			d.within = true
			d.named(ov, nv, where)
			d.within = false
		case f.Object != nil && f.List: // of sub-ports or sessions
			d.named(ov, nv, where)
		case f.Object != nil && f.Optional:
			if ov.IsNil() != nv.IsNil() {
				d.add(Change{Path: where, Old: presence(!ov.IsNil()), New: presence(!nv.IsNil())}, "")
			} else if !ov.IsNil() {
				d.structure(ov.Elem(), nv.Elem(), where)
			}
		case f.Object != nil:
			d.structure(ov, nv, where)
		case !equal(&f, ov, nv):
			d.add(Change{Path: where, Old: text(&f, ov), New: text(&f, nv)}, f.Reload)
		}
	}
	switch o := old.Addr().Interface().(type) {
	case *Session:
		n := new.Addr().Interface().(*Session)
		d.secret(o.PasswordFile == n.PasswordFile, o.Password, n.Password, join(path, "password_file"), "password")
	case *TCPAO:
		n := new.Addr().Interface().(*TCPAO)
		d.secret(o.KeyFile == n.KeyFile, o.Key, n.Key, join(path, "key_file"), "key")
	}
}

// secret compares the contents of two files with the same name. An empty secret was not loaded, as after Parse.
func (d *differ) secret(same bool, old, new, path, noun string) {
	if same && old != "" && new != "" && old != new {
		d.add(Change{Path: path, Old: "its " + noun, New: "another " + noun}, "")
	}
}

// bfdKeys compares the keys of BFD as a whole. The change shows IDs and names of files, and no key.
func (d *differ) bfdKeys(old, new []BFDKey, path string) {
	show := func(keys []BFDKey) string {
		words := make([]string, len(keys))
		for i, k := range keys {
			words[i] = fmt.Sprintf("%d from %s", k.ID, k.KeyFile)
		}
		return "[" + strings.Join(words, ", ") + "]"
	}
	c := Change{Kind: ChangeBFDKeys, Path: path, Old: show(old), New: show(new)}
	if c.Old == c.New {
		same := func(o, n BFDKey) bool { return o.Key == n.Key || o.Key == "" || n.Key == "" } // not loaded, as after Parse
		if slices.EqualFunc(old, new, same) {
			return
		}
		c.Old, c.New = "its keys", "other keys"
	}
	d.live = append(d.live, c)
}

// proofKeys compares the keys of proofs as a whole. The change shows names of files, and no key.
func (d *differ) proofKeys(old, new []ProofKey, path string) {
	show := func(keys []ProofKey) string {
		words := make([]string, len(keys))
		for i, k := range keys {
			words[i] = k.KeyFile
		}
		return "[" + strings.Join(words, ", ") + "]"
	}
	c := Change{Kind: ChangeProofKeys, Path: path, Old: show(old), New: show(new)}
	if c.Old == c.New {
		same := func(o, n ProofKey) bool { return o.Key == n.Key || o.Key == "" || n.Key == "" } // not loaded, as after Parse
		if slices.EqualFunc(old, new, same) {
			return
		}
		c.Old, c.New = "its keys", "other keys"
	}
	d.live = append(d.live, c)
}

// named compares the planes, sub-ports or sessions with the same name; paths have their indexes after the change, those
// of removed ones their indexes before.
func (d *differ) named(old, new reflect.Value, path string) {
	before, after := namesOf(old), namesOf(new)
	var kept, ordered []string
	for i, name := range before {
		if slices.Contains(after, name) {
			kept = append(kept, name)
		} else {
			d.add(Change{Path: item(path, i), Old: name, New: presence(false)}, "")
		}
	}
	for i, name := range after {
		at := slices.Index(before, name)
		if at < 0 {
			d.add(Change{Path: item(path, i), Old: presence(false), New: name}, "")
			continue
		}
		ordered = append(ordered, name)
		d.structure(old.Index(at), new.Index(i), item(path, i))
	}
	if !slices.Equal(kept, ordered) {
		d.add(Change{Path: path, Old: "[" + strings.Join(kept, ", ") + "]", New: "[" + strings.Join(ordered, ", ") + "]"}, "")
	}
}

// namesOf returns the names of planes and sessions, and the devices of sub-ports, which are unique in their list.
func namesOf(list reflect.Value) []string {
	out := make([]string, list.Len())
	for i := range out {
		switch o := list.Index(i).Interface().(type) {
		case Plane:
			out[i] = o.Name
		case SubPort:
			out[i] = o.Device
		case Session:
			out[i] = o.Name
		}
	}
	return out
}

// equal compares two values and treats an empty and an absent list as equal.
func equal(f *model.Field, a, b reflect.Value) bool {
	if f.List && a.Len() == 0 && b.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

func presence(there bool) string {
	if there {
		return "present"
	}
	return "none"
}

// text returns a value in the syntax of the file.
func text(f *model.Field, v reflect.Value) string {
	if f.List {
		words := make([]string, v.Len())
		for i := range words {
			words[i] = f.Scalar.Format(v.Index(i))
		}
		return "[" + strings.Join(words, ", ") + "]"
	}
	if v.IsZero() && f.Default == "" && f.Scalar.JSON != "boolean" {
		return "none"
	}
	return f.Scalar.Format(v)
}
