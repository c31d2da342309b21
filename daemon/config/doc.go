// Package config reads a fared configuration file into an immutable value.
//
// A file passes through these steps:
//
//	bytes -> text checks -> YAML nodes -> decode -> resolve -> validate -> *Config
//
// One tree of Go types (types.go) serves all purposes: the decoder fills it, the daemon reads it, and the JSON schema
// and docs/configuration.md are generated from it. Its struct tags define the keys and their values:
//
//	yaml      the key
//	default   the value of an absent key, in the syntax of the file
//	derived   the rule that gives an absent key its value (code in resolve.go), as text
//	min, max  the inclusive range of a scalar, or of each element of a list of scalars
//	items     the least and most elements of a list, "1..64"
//	enum      the permitted words of a string
//	refused   a word of which users may think that it is permitted, and why it is not: "word: reason"
//	unit      the unit of a bare integer
//	required  "true": the key must be present
//	reload    the kind of Change that a reload may make to it while fared runs; without it a change needs a restart
//
// Decoding is strict: an unknown or repeated key, a wrong type, a missing unit, an alias, a second document are errors.
// One pass finds all errors and their positions; an erroneous value never causes another error. Only resolve.go applies
// defaults. validate has no side effects. Secrets are not part of a file: it names the files that contain them, and
// Load reads those last.
//
// A *Config is shared by many goroutines and never modified: a reload creates another one, and Diff determines whether
// the running daemon can change from one to the other.
package config

//go:generate go run ./internal/gen -root ../..
