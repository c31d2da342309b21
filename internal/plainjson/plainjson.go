// Package plainjson writes messages of the API as JSON, as the command line prints them.
package plainjson

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Append writes a message as JSON with the field names of the .proto files, in their order, every scalar, list and map
// present, and 64-bit integers as numbers. Keys of maps are strings, and sorted. protojson would write 64-bit integers
// as strings, which scripts do not expect.
func Append(b []byte, m protoreflect.Message) []byte {
	b = append(b, '{')
	fields := m.Descriptor().Fields()
	first := true
	for i := range fields.Len() {
		f := fields.Get(i)
		if (f.Message() != nil && !f.IsList() && !f.IsMap() || f.ContainingOneof() != nil) && !m.Has(f) {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(strconv.AppendQuote(b, string(f.Name())), ':')
		v := m.Get(f)
		if f.IsMap() {
			b = appendMap(b, f, v.Map())
			continue
		}
		if !f.IsList() {
			b = appendValue(b, f, v)
			continue
		}
		b = append(b, '[')
		for k := range v.List().Len() {
			if k > 0 {
				b = append(b, ',')
			}
			b = appendValue(b, f, v.List().Get(k))
		}
		b = append(b, ']')
	}
	return append(b, '}')
}

func appendMap(b []byte, f protoreflect.FieldDescriptor, m protoreflect.Map) []byte {
	keys := make([]string, 0, m.Len())
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		keys = append(keys, k.String())
		return true
	})
	slices.Sort(keys)
	b = append(b, '{')
	for i, k := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		text, _ := json.Marshal(k) // a string always marshals
		b = append(append(b, text...), ':')
		b = appendValue(b, f.MapValue(), m.Get(protoreflect.ValueOfString(k).MapKey()))
	}
	return append(b, '}')
}

func appendValue(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return Append(b, v.Message())
	case protoreflect.StringKind:
		text, _ := json.Marshal(v.String()) // a string always marshals
		return append(b, text...)
	case protoreflect.EnumKind:
		return strconv.AppendQuote(b, string(f.Enum().Values().ByNumber(v.Enum()).Name()))
	default:
		return fmt.Append(b, v.Interface()) // bool and integers
	}
}
