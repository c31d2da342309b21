package config

import (
	_ "embed" // for the schema

	"bytes"
)

//go:generate go run ./internal/gen -root ../..

//go:embed fared.schema.json
var schema []byte

// Schema returns the JSON schema (draft 2020-12) of a configuration file, generated from the types of this package.
func Schema() []byte { return bytes.Clone(schema) }
