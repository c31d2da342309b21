package model

import (
	"log/slog"
	"reflect"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// enumOf returns the words of an enumeration of fare, wecmp or slog, or nil for another type. The zero value comes
// first if it is the default of its package.
func enumOf(t reflect.Type) *Scalar {
	switch t {
	case reflect.TypeFor[fare.Role]():
		return words(fare.RoleServer, "server", fare.RoleLeaf, "leaf")
	case reflect.TypeFor[fare.Encoding]():
		return words(fare.LinkBandwidth, "link-bandwidth", fare.FARECommunity, "extended-community")
	case reflect.TypeFor[fare.Format]():
		return words(fare.IEEE754, "ieee754", fare.Uint32, "uint32")
	case reflect.TypeFor[fare.MissingPolicy]():
		return words(fare.MissingLocal, "local", fare.MissingEqual, "equal", fare.MissingSkip, "skip")
	case reflect.TypeFor[fare.AllMissingPolicy]():
		return words(fare.AllMissingLocal, "local", fare.AllMissingEqual, "equal")
	case reflect.TypeFor[fare.ConflictPolicy]():
		return words(fare.ConflictWeigh, "weigh", fare.ConflictPreferFirst, "prefer-first", fare.ConflictDrop, "drop")
	case reflect.TypeFor[fare.UnprovedPolicy]():
		return words(fare.UnprovedReport, "report", fare.UnprovedAvoid, "avoid")
	case reflect.TypeFor[fare.ZeroPolicy]():
		return words(fare.ZeroEqual, "equal", fare.ZeroUnreachable, "unreachable")
	case reflect.TypeFor[wecmp.Mode]():
		return words(wecmp.PerFlow, "per-flow", wecmp.PerPacket, "per-packet")
	case reflect.TypeFor[wecmp.Policy]():
		return words(wecmp.Reweight, "reweight", wecmp.Remap, "remap")
	case reflect.TypeFor[wecmp.Addressing]():
		return words(wecmp.Loopback, "loopback", wecmp.PortAddress, "port", wecmp.SubPortAddress, "sub-port")
	case reflect.TypeFor[wecmp.Ordering]():
		return words(wecmp.Weak, "weak", wecmp.Partial, "partial", wecmp.Strong, "strong")
	case typeLevel:
		return words(slog.LevelDebug, "debug", slog.LevelInfo, "info", slog.LevelWarn, "warn", slog.LevelError, "error")
	}
	return nil
}

// words returns a scalar for pairs of a value and its word.
func words(pairs ...any) *Scalar {
	var names []string
	var values []reflect.Value
	for i := 0; i < len(pairs); i += 2 {
		values = append(values, reflect.ValueOf(pairs[i]))
		names = append(names, pairs[i+1].(string))
	}
	return wordScalar(names,
		func(v reflect.Value) string {
			for i := range values {
				if values[i].Equal(v) {
					return names[i]
				}
			}
			return ""
		},
		func(v reflect.Value, i int, _ string) { v.Set(values[i]) })
}

// wordScalar returns a scalar with the given words. format returns "" for a value without a word.
func wordScalar(names []string, format func(reflect.Value) string, set func(v reflect.Value, i int, word string)) *Scalar {
	return &Scalar{
		Name: "one of", JSON: "string", Words: names, Format: format,
		Parse: func(text string, v reflect.Value) *Problem {
			i := slices.Index(names, text)
			if i < 0 {
				return &Problem{Show(text) + " is not a known value", "use " + OneOf(names)}
			}
			set(v, i, names[i])
			return nil
		},
	}
}

// OneOf formats a list of words: "a", "a or b", "a, b or c".
func OneOf(words []string) string {
	n := len(words) - 1
	if n < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:n], ", ") + " or " + words[n]
}
