package config

import (
	"fmt"
	"reflect"
	"strings"
	"sync"

	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/internal/spelling"
)

// suggest returns the remedy for an unknown key and, if a key of the same object resembles it, that key. Otherwise the
// remedy lists the objects that have the key, or all keys of this object.
func suggest(fields []model.Field, key string) (remedy, meant string) {
	plain := strings.ReplaceAll(strings.ToLower(key), "-", "_")
	least := 2 + len(key)/4
	for _, f := range fields {
		if d := spelling.Distance(plain, f.Key, least); d < least && d < len(f.Key) {
			meant, least = f.Key, d
		}
	}
	for _, f := range fields {
		if meant == "" && len(key) > 2 && (strings.HasPrefix(f.Key, plain) || strings.HasPrefix(plain, f.Key)) {
			meant = f.Key
		}
	}
	if meant != "" {
		return fmt.Sprintf("did you mean %q?", meant), meant
	}
	if home, ok := homes()[key]; ok {
		return "it belongs in " + home, ""
	}
	return "use " + model.OneOf(keys(fields)), ""
}

// homes maps each key to the objects that have it, as a path without indexes.
var homes = sync.OnceValue(func() map[string]string {
	out := map[string]string{}
	var walk func(t reflect.Type, path string)
	walk = func(t reflect.Type, path string) {
		for _, f := range model.Fields(t) {
			home := path
			if home == "" {
				home = "the top level"
			}
			if at, ok := out[f.Key]; ok {
				home = at + " or " + home
			}
			out[f.Key] = home
			if f.Object != nil {
				down := join(path, f.Key)
				if f.List {
					down += "[]"
				}
				walk(f.Object, down)
			}
		}
	}
	walk(reflect.TypeFor[Config](), "")
	return out
})
