package main

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// object is the part of a schema object that the page shows.
type object struct {
	Description string
	Required    []string
	Properties  properties
	Defs        map[string]*object `json:"$defs"`
}

// property is the part of a key's schema that the page shows.
type property struct {
	Ref         string `json:"$ref"`
	Type        string
	Description string
	Enum        []string
	Default     any
	Minimum     json.Number
	Maximum     json.Number
	MinItems    int
	MaxItems    int
	Items       *property
	TypeName    string `json:"x-type"`
	Unit        string `json:"x-unit"`
	Least       string `json:"x-minimum"`
	Most        string `json:"x-maximum"`
	Reload      string `json:"x-reload"`
	DefaultRule string `json:"x-default-rule"`
}

// properties are the keys of an object in the schema's order.
type properties []namedProperty

type namedProperty struct {
	key string
	property
}

// UnmarshalJSON preserves the order, which a map would not.
func (p *properties) UnmarshalJSON(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if _, err := dec.Token(); err != nil {
		return err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		one := namedProperty{key: fmt.Sprint(key)}
		if err := dec.Decode(&one.property); err != nil {
			return fmt.Errorf("%s: %w", one.key, err)
		}
		*p = append(*p, one)
	}
	return nil
}
