package config

import (
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon/config/internal/model"
)

// decoder fills the Go types from YAML nodes, records the position of every value, and reports mismatches. It does not
// recurse into unknown keys, so its depth is that of the types.
type decoder struct{ *problems }

func at(n *yaml.Node) position { return position{n.Line, n.Column} }

// object decodes a mapping into the struct that target points to.
func (d decoder) object(n *yaml.Node, path string, target any) {
	d.structure(n, path, reflect.ValueOf(target).Elem())
}

func (d decoder) structure(n *yaml.Node, path string, v reflect.Value) {
	d.places[path] = at(n)
	if !d.plain(n, path) {
		return
	}
	fields := model.Fields(v.Type())
	if n.Kind != yaml.MappingNode {
		d.fail(at(n), path, "is "+kind(n)+" but has to be a mapping", "write keys such as "+fields[0].Key+": under it")
		return
	}
	seen := map[string]int{}
	var misspelled []string // known keys that resemble unknown ones
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode || key.Anchor != "" {
			d.fail(at(key), path, "a key is not plain text", "use "+model.OneOf(keys(fields)))
			continue
		}
		where := join(path, key.Value)
		if line, ok := seen[key.Value]; ok {
			d.at(at(key), where, fmt.Sprintf("is already set at line %d", line), "keep one of the two")
			continue
		}
		seen[key.Value] = key.Line
		f := find(fields, key.Value)
		if f == nil {
			remedy, meant := suggest(fields, key.Value)
			d.at(at(key), join(path, model.Show(key.Value)), "is not a known key", remedy)
			if meant != "" {
				misspelled = append(misspelled, meant)
			}
			continue
		}
		d.field(value, where, f, v.Field(f.Index))
	}
	for _, key := range misspelled {
		if _, ok := seen[key]; !ok { // one error is enough: do not report the key as missing too
			d.broken[join(path, key)] = true
		}
	}
}

func (d decoder) field(n *yaml.Node, path string, f *model.Field, v reflect.Value) {
	if f.List {
		d.list(n, path, f, v)
		return
	}
	d.value(n, path, f, v)
}

func (d decoder) list(n *yaml.Node, path string, f *model.Field, v reflect.Value) {
	d.places[path] = at(n)
	if !d.plain(n, path) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		d.fail(at(n), path, "is "+kind(n)+" but has to be a list", "put it after a dash, or between [ and ]")
		return
	}
	items := n.Content
	if len(items) > f.MaxItems {
		d.at(at(items[f.MaxItems]), path, fmt.Sprintf("has %d elements", len(items)), fmt.Sprintf("use at most %d", f.MaxItems))
		items = items[:f.MaxItems]
		d.broken[item(path, f.MaxItems)] = true // a reference to the other elements is not an error
	}
	v.Set(reflect.MakeSlice(v.Type(), len(items), len(items)))
	for i, e := range items {
		d.value(e, item(path, i), f, v.Index(i))
	}
}

// value decodes an object or a scalar.
func (d decoder) value(n *yaml.Node, path string, f *model.Field, v reflect.Value) {
	if f.Object != nil {
		if f.Optional {
			v.Set(reflect.New(f.Object))
			v = v.Elem()
		}
		d.structure(n, path, v)
		return
	}
	d.places[path] = at(n)
	if !d.plain(n, path) {
		return
	}
	s := f.Scalar
	if n.Kind != yaml.ScalarNode {
		d.fail(at(n), path, "is "+kind(n)+" but has to be "+article(s), "write "+example(f))
		return
	}
	tag := n.ShortTag()
	if s.JSON != "string" && tag == "!!str" && n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		d.fail(at(n), path, model.Show(n.Value)+" is text but has to be "+article(s), "remove the quotes")
		return
	}
	if bad := s.Parse(n.Value, v); bad != nil {
		if word, why, found := strings.Cut(f.Refused, ": "); found && word == n.Value {
			bad.Wrong = word + " " + why
		}
		d.fail(at(n), path, bad.Wrong, bad.Right)
		return
	}
	if s.JSON == "string" && tag != "!!str" {
		v.SetZero()
		d.fail(at(n), path, model.Show(n.Value)+" is "+kind(n)+" to YAML but has to be text", fmt.Sprintf("write %q", n.Value))
	}
}

// plain rejects the parts of YAML that hide the content of a file: anchors, aliases, tags, and omitted values.
func (d decoder) plain(n *yaml.Node, path string) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		d.fail(at(n), path, "an alias is used", "write the value out")
	case n.Anchor != "":
		d.fail(at(n), path, "an anchor is set", "remove &"+model.Show(n.Anchor)+" and write the value out where it is used")
	case n.Style&yaml.TaggedStyle != 0:
		d.fail(at(n), path, "the tag "+model.Show(n.Tag)+" is used", "remove it")
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null":
		d.fail(at(n), path, "has no value", "write one or remove the key")
	default:
		return true
	}
	return false
}

// kind returns the name of a node's kind.
func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!int", "!!float":
		return "a number"
	case "!!bool":
		return "a truth value"
	case "!!timestamp":
		return "a date"
	}
	return "text"
}

// article returns the name of a scalar's type with its article.
func article(s *model.Scalar) string {
	switch {
	case s.Words != nil:
		return model.OneOf(s.Words)
	case strings.ContainsRune("aeiI", rune(s.Name[0])):
		return "an " + s.Name
	case s.JSON == "boolean", s.Name == "text", s.Name == "permissions":
		return s.Name
	}
	return "a " + s.Name
}

// example returns an example value of a field.
func example(f *model.Field) string {
	switch {
	case f.Scalar.Words != nil:
		return f.Scalar.Words[0]
	case f.Default != "" && !f.List:
		return "for example " + f.Default
	case f.Min != "":
		return "for example " + f.Min
	}
	return article(f.Scalar)
}

func find(fields []model.Field, key string) *model.Field {
	for i := range fields {
		if fields[i].Key == key {
			return &fields[i]
		}
	}
	return nil
}

func keys(fields []model.Field) []string {
	out := make([]string, len(fields))
	for i := range fields {
		out[i] = fields[i].Key
	}
	return out
}
