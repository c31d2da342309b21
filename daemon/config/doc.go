// Package config reads a fared configuration file into an immutable value.
//
// The way of a file:
//
//	bytes -> text checks -> YAML nodes -> decode -> resolve -> Validate -> *Config
//
// One tree of Go types (types.go) is everything at once: what the decoder fills, what the daemon reads, what the JSON
// schema and docs/configuration.md are generated from. Its struct tags say what a key is called and what it may hold:
//
//	yaml      the key
//	default   the value of an absent key, as the file would write it
//	derived   the rule that gives an absent key its value (code in resolve.go), for people
//	min, max  the inclusive range of a scalar, or of each element of a list of scalars
//	items     the least and most elements of a list, "1..64"
//	enum      the words that a string may be
//	unit      what a bare integer counts
//	required  "true": the key must be written
//	reload    the kind of Change that a reload may make to it while fared runs; without it a change needs a restart
//
// Decoding is strict: an unknown or repeated key, a wrong type, a missing unit, an alias, a second document are errors.
// Every error is found in one pass and carries its position; a value that is itself in error never causes another error.
// Defaults are applied in one place (resolve.go) and only there. Validate looks and never touches. Secrets are not part
// of a file: it names the files that hold them, and Load reads those last.
//
// A *Config is shared by many goroutines: nobody writes to it, a reload makes another one and Diff says whether the
// running daemon can go from one to the other.
package config
