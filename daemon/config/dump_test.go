package config

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/fared/fared/daemon/config/internal/model"
)

// dump returns every value of a resolved configuration, including defaults, one per line.
func dump(c *Config) string {
	var b strings.Builder
	dumpStruct(&b, reflect.ValueOf(c).Elem(), "")
	return b.String()
}

func dumpStruct(b *strings.Builder, v reflect.Value, path string) {
	for _, f := range model.Fields(v.Type()) {
		fv, where := v.Field(f.Index), join(path, f.Key)
		switch {
		case f.Object != nil && f.List:
			for i := range fv.Len() {
				dumpStruct(b, fv.Index(i), item(where, i))
			}
		case f.Object != nil && f.Optional:
			if !fv.IsNil() {
				dumpStruct(b, fv.Elem(), where)
			}
		case f.Object != nil:
			dumpStruct(b, fv, where)
		default:
			fmt.Fprintf(b, "%s: %s\n", where, text(&f, fv))
		}
	}
}
