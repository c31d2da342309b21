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
	ChangeSpeed         ChangeKind = "speed"          // of a sub-port
	ChangeLinks         ChangeKind = "links"          // damping
	ChangeLogLevel      ChangeKind = "log-level"
	ChangeBFDKeys       ChangeKind = "bfd-keys"
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
	d.sources(old, new)
	for _, list := range []Changes{d.live, d.restart} {
		slices.SortFunc(list, func(a, b Change) int { return cmp.Compare(a.Path, b.Path) })
	}
	if len(d.restart) > 0 {
		return nil, &RestartError{d.restart}
	}
	return d.live, nil
}

type differ struct{ live, restart Changes }

// sources moves a change of the loopbacks to the changes that need a restart if it changes the source groups: tables,
// weights and the data plane's objects exist per source group.
func (d *differ) sources(old, new *Config) {
	at := slices.IndexFunc(d.live, func(c Change) bool { return c.Kind == ChangeLoopbacks })
	if at < 0 || sameSources(old, new) {
		return
	}
	d.restart = append(d.restart, Change{Path: d.live[at].Path, Old: d.live[at].Old, New: d.live[at].New})
	d.live = slices.Delete(d.live, at, at+1)
}

func (d *differ) structure(old, new reflect.Value, path string) {
	for _, f := range model.Fields(old.Type()) {
		ov, nv, where := old.Field(f.Index), new.Field(f.Index), join(path, f.Key)
		switch {
		case f.Reload == string(ChangeBFDKeys):
			d.bfdKeys(ov.Interface().([]BFDKey), nv.Interface().([]BFDKey), where)
		case f.Reload == string(ChangeProofKeys):
			d.proofKeys(ov.Interface().([]ProofKey), nv.Interface().([]ProofKey), where)
		case f.Object != nil && f.List:
			d.list(ov, nv, where)
		case f.Object != nil && f.Optional:
			if ov.IsNil() != nv.IsNil() {
				d.restart = append(d.restart, Change{Path: where, Old: presence(!ov.IsNil()), New: presence(!nv.IsNil())})
			} else if !ov.IsNil() {
				d.structure(ov.Elem(), nv.Elem(), where)
			}
		case f.Object != nil:
			d.structure(ov, nv, where)
		case !equal(&f, ov, nv):
			c := Change{Kind: ChangeKind(f.Reload), Path: where, Old: text(&f, ov), New: text(&f, nv)}
			if f.Reload != "" {
				d.live = append(d.live, c)
			} else {
				d.restart = append(d.restart, c)
			}
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
		d.restart = append(d.restart, Change{Path: path, Old: "its " + noun, New: "another " + noun})
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

// list compares by index, because all other parts identify a plane, sub-port or session by its index.
func (d *differ) list(old, new reflect.Value, path string) {
	for i := range max(old.Len(), new.Len()) {
		switch where := item(path, i); {
		case i >= old.Len():
			d.restart = append(d.restart, Change{Path: where, Old: presence(false), New: presence(true)})
		case i >= new.Len():
			d.restart = append(d.restart, Change{Path: where, Old: presence(true), New: presence(false)})
		default:
			d.structure(old.Index(i), new.Index(i), where)
		}
	}
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
