package memfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDAXSize reads the sizes of devices from folders as sysfs has them.
func TestDAXSize(t *testing.T) {
	for i, test := range []struct {
		subsystem, size, align string // "": the file is missing
		want                   int64
		err                    error
		text                   string
	}{
		{subsystem: "../../bus/dax", size: "98566144\n", align: "2097152\n", want: 47 << 21},
		{subsystem: "../../bus/dax", size: "98566145\n", align: "2097152\n", want: 47 << 21},
		{subsystem: "../../class/dax", size: "98566144\n", want: 47 << 21}, // Linux 5.9
		{subsystem: "../../bus/dax", size: "98566144\n", align: "4096\n", want: 47 << 21},
		{subsystem: "../../bus/dax", size: "1073741824\n", align: "1073741824\n", want: 1 << 30},
		{subsystem: "../../bus/dax", size: "1073741823\n", align: "1073741824\n", err: Err, text: "less than its alignment of 1073741824 bytes"},
		{subsystem: "../../bus/dax", size: "0\n", align: "2097152\n", err: Err, text: "less than its alignment"}, // its memory is in no device
		{subsystem: "../../class/mem", size: "98566144\n", align: "4096\n", err: Err, text: `of the kind "mem"`},
		{size: "98566144\n", align: "2097152\n", err: os.ErrNotExist, text: "kind of the device"},
		{subsystem: "../../bus/dax", align: "2097152\n", err: os.ErrNotExist, text: "size of the device"},
		{subsystem: "../../bus/dax", size: "many\n", align: "2097152\n", text: `size of the device: "many\n" is not a number`},
		{subsystem: "../../bus/dax", size: "98566144\n", align: "-1\n", text: `align of the device: "-1\n" is not a number`},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			dir := t.TempDir()
			if test.subsystem != "" {
				if err := os.Symlink(test.subsystem, filepath.Join(dir, "subsystem")); err != nil {
					t.Fatal(err)
				}
			}
			for name, text := range map[string]string{"size": test.size, "align": test.align} {
				if text == "" {
					continue
				}
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := daxSize(dir)
			switch {
			case test.err == nil && test.text == "":
				if got != test.want || err != nil {
					t.Errorf("got %d, %v, want %d", got, err, test.want)
				}
			case err == nil || test.err != nil && !errors.Is(err, test.err) || !strings.Contains(err.Error(), test.text):
				t.Errorf("got %d, %v, want %v with %q", got, err, test.err, test.text)
			}
		})
	}
}
