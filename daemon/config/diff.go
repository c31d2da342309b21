package config

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/fared/fared/daemon/config/internal/model"
)

// ChangeKind says what a reload changes.
type ChangeKind string

// The kinds of change that a running daemon makes.
const (
	ChangeLoopbacks     ChangeKind = "loopbacks"
	ChangeDrainDelay    ChangeKind = "drain-delay"
	ChangePathBandwidth ChangeKind = "path-bandwidth" // advertise, missing, all_zero, increase_hold_up
	ChangeSpeed         ChangeKind = "speed"          // of a sub-port
	ChangeLogLevel      ChangeKind = "log-level"
)

// Change is one value that differs between two configurations. Old and New are as a file writes them, "none" when absent.
type Change struct {
	Kind     ChangeKind
	Path     string
	Old, New string
}

// String draws path: old -> new.
func (c Change) String() string { return fmt.Sprintf("%s: %s -> %s", c.Path, c.Old, c.New) }

// Changes is what a reload changes, sorted by path.
type Changes []Change

// Has says whether a kind of change is among them.
func (c Changes) Has(kind ChangeKind) bool {
	return slices.ContainsFunc(c, func(one Change) bool { return one.Kind == kind })
}

// String draws one line a change.
func (c Changes) String() string {
	lines := make([]string, len(c))
	for i := range c {
		lines[i] = c[i].String()
	}
	return strings.Join(lines, "\n")
}

// RestartError says that two configurations differ in what cannot change while fared runs. Nothing is to be applied then, not
// even the changes that could be.
type RestartError struct {
	Changes Changes // what cannot change, sorted by path; Kind is ""
}

// Error lists every path.
func (e *RestartError) Error() string {
	lines := make([]string, len(e.Changes))
	for i := range e.Changes {
		lines[i] = "\n  " + e.Changes[i].String()
	}
	return "nothing was changed: these need a restart of fared:" + strings.Join(lines, "")
}

// Diff says what a reload changes. Equal configurations give no changes. The error is a *RestartError that lists every value
// that would need a restart; the changes are nil then.
func Diff(old, new *Config) (Changes, error) {
	var d differ
	d.structure(reflect.ValueOf(old).Elem(), reflect.ValueOf(new).Elem(), "")
	for _, list := range []Changes{d.live, d.restart} {
		slices.SortFunc(list, func(a, b Change) int { return cmp.Compare(a.Path, b.Path) })
	}
	if len(d.restart) > 0 {
		return nil, &RestartError{d.restart}
	}
	return d.live, nil
}

type differ struct{ live, restart Changes }

func (d *differ) structure(old, new reflect.Value, path string) {
	for _, f := range model.Fields(old.Type()) {
		ov, nv, where := old.Field(f.Index), new.Field(f.Index), join(path, f.Key)
		switch {
		case f.Object != nil && f.List:
			d.list(&f, ov, nv, where)
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
	if o, ok := old.Addr().Interface().(*Session); ok {
		// An empty password was not loaded: Parse leaves it so.
		if n := new.Addr().Interface().(*Session); o.PasswordFile == n.PasswordFile && o.Password != "" && n.Password != "" && o.Password != n.Password {
			d.restart = append(d.restart, Change{Path: join(path, "password_file"), Old: "its password", New: "another password"})
		}
	}
}

// list compares by index: an index is what every other part knows a plane, sub-port or session by.
func (d *differ) list(f *model.Field, old, new reflect.Value, path string) {
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

// equal treats an empty and an absent list alike.
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

// text draws a value as a file writes it.
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
