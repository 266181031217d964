"""One public function per operation; each picks a kernel or the plain reference."""
