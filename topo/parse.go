package topo

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon/config"
)

// MaxFileSize is the maximum size of a fabric's file, in bytes.
const MaxFileSize = 64 << 10

// Parse parses a fabric's file: a YAML mapping of [Keys] to scalars, such as
//
//	name: figure1
//	planes: 4
//	servers: 64
//	speed: 400G
//
// Absent keys have the zero value, which means their default; [Spec.WithDefaults] fills them in. The returned Spec is
// valid with its defaults. name stands for the file in errors. The error is of type config.Errors and lists every
// mistake with its place and a remedy.
func Parse(name string, text []byte) (Spec, error) {
	p := parser{file: name, places: map[string]*yaml.Node{}}
	p.document(text)
	var problems Problems
	if len(p.errs) == 0 {
		errors.As(p.spec.WithDefaults().Validate(), &problems)
	} else {
		problems, _ = p.spec.WithDefaults().validateKeys() // values that are invalid by themselves cannot be compared
	}
	for _, q := range problems {
		p.refuse(p.places[q.Key], q.Key, q.Text, q.Remedy)
	}
	if len(p.errs) > 0 {
		slices.SortStableFunc(p.errs, func(a, b config.Error) int {
			return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
		})
		return Spec{}, p.errs
	}
	return p.spec, nil
}

type parser struct {
	file   string
	spec   Spec
	places map[string]*yaml.Node // values in the file, by key
	errs   config.Errors
}

// refuse reports a mistake at a node; nil means the document as a whole.
func (p *parser) refuse(at *yaml.Node, key, wrong, right string) {
	e := config.Error{File: p.file, Line: 1, Column: 1, Path: cmp.Or(key, "document"), Wrong: wrong, Right: right}
	if at != nil {
		e.Line, e.Column = at.Line, at.Column
	}
	p.errs = append(p.errs, e)
}

func (p *parser) document(text []byte) {
	switch {
	case len(text) > MaxFileSize:
		p.refuse(nil, "", fmt.Sprintf("is larger than %d bytes", MaxFileSize), "a fabric is a dozen lines")
		return
	case !utf8.Valid(text):
		p.refuse(nil, "", "is not UTF-8", "save the file as UTF-8")
		return
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var root, second yaml.Node
	switch err := dec.Decode(&root); {
	case errors.Is(err, io.EOF):
		p.refuse(nil, "", "is empty", "write a key, such as name: "+Spec{}.WithDefaults().Name)
		return
	case err != nil:
		p.syntax(err)
		return
	}
	switch err := dec.Decode(&second); {
	case err == nil:
		p.refuse(&second, "", "a second document starts here", "keep one fabric in a file")
	case !errors.Is(err, io.EOF):
		p.syntax(err)
	}
	p.mapping(root.Content[0])
}

func (p *parser) mapping(n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		p.refuse(n, "", "is not a mapping", "write keys and values, such as planes: 4")
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		if name.Kind != yaml.ScalarNode {
			p.refuse(name, "", "a key is not plain text", "write keys such as planes")
			continue
		}
		k := findKey(name.Value)
		if k == nil {
			p.refuse(name, quote(name.Value), "is not a known key", suggest(name.Value))
			continue
		}
		if first := p.places[k.Name]; first != nil {
			p.refuse(name, k.Name, fmt.Sprintf("is set in line %d already", first.Line), "keep one of the two")
			continue
		}
		p.places[k.Name] = value
		p.value(k, value)
	}
}

// value parses a key's value. It accepts plain text only, and no YAML feature that hides the value.
func (p *parser) value(k *Key, n *yaml.Node) {
	example := "write " + k.Name + ": " + k.example()
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "" || n.Style&yaml.TaggedStyle != 0:
		p.refuse(n, k.Name, "is written with an anchor, alias or tag", example)
	case n.Kind != yaml.ScalarNode:
		p.refuse(n, k.Name, "is not one value", example)
	case n.ShortTag() == "!!null":
		p.refuse(n, k.Name, "has no value", example+", or leave it out")
	default:
		var q Problem
		if err := k.Set(&p.spec, n.Value); errors.As(err, &q) {
			p.refuse(n, k.Name, q.Text, q.Remedy)
		}
	}
}

var yamlLine = regexp.MustCompile(`^yaml: (?:unmarshal errors:\s*)?line (\d+): `)

// syntax reports an error of the YAML parser, which contains at most the line.
func (p *parser) syntax(err error) {
	text, at := err.Error(), &yaml.Node{Line: 1, Column: 1}
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		if line, err := strconv.Atoi(m[1]); err == nil {
			at.Line = max(line, 1)
		}
	}
	text = strings.ReplaceAll(strings.TrimPrefix(text, "yaml: "), "\n", " ")
	p.refuse(at, "", "is not YAML: "+text, "correct this line or the previous line")
}

// Marshal returns a valid Spec as a file that Parse accepts, with its name and all values that are not the default.
func Marshal(s Spec) []byte {
	s = s.WithDefaults()
	root := &yaml.Node{Kind: yaml.MappingNode}
	for _, k := range keys {
		without := s
		field := reflect.ValueOf(k.field(&without)).Elem()
		field.SetZero()
		if k.Name == "name" || k.Text(without.WithDefaults()) != k.Text(s) {
			value := &yaml.Node{Kind: yaml.ScalarNode, Value: k.Text(s)}
			if field.Kind() == reflect.String {
				value.SetString(value.Value) // quoted if YAML would give it another type: a fabric may be called null
			}
			root.Content = append(root.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: k.Name}, value)
		}
	}
	text, err := yaml.Marshal(root)
	if err != nil {
		panic(fmt.Sprintf("topo: a tree of plain nodes does not encode: %v", err))
	}
	return text
}
