// Replaces the `cpuid` and `xgetbv` instructions by which oneDNN detects tiles by illegal ones,
// which emulator.c handles: at the offsets in torch's library that TILEFORGE_AMX_SITES lists.
//
// An auditing library (LD_AUDIT, see rtld-audit(7)): the loader calls it when a library is mapped
// and before its code runs. oneDNN queries the CPU while torch is being loaded.
#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void give_up(const char* why) {
  perror(why);
  abort();
}

static void overwrite(uint8_t* at) {
  static const uint8_t kCpuid[] = {0x0f, 0xa2}, kXgetbv[] = {0x0f, 0x01, 0xd0};
  const uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)(at + 1) & ~(size - 1);
  const int is_cpuid = !memcmp(at, kCpuid, sizeof(kCpuid));
  if (!is_cpuid && memcmp(at, kXgetbv, sizeof(kXgetbv))) {
    fputs("AMX emulator: neither cpuid nor xgetbv at a listed place\n", stderr);
    abort();
  }
  if (mprotect((void*)page, size, PROT_READ | PROT_WRITE | PROT_EXEC)) {
    give_up("AMX emulator: writing to the library's text");
  }
  at[1] = is_cpuid ? 0xff : 0x0b;  // UD0, UD2
  mprotect((void*)page, size, PROT_READ | PROT_EXEC);
}

unsigned int la_version(unsigned int version) {
  (void)version;
  return LAV_CURRENT;
}

unsigned int la_objopen(struct link_map* library, Lmid_t space, uintptr_t* cookie) {
  (void)space, (void)cookie;
  const char* name = strrchr(library->l_name, '/');
  if (!name || strcmp(name, "/libtorch_cpu.so")) return 0;
  const char* path = getenv("TILEFORGE_AMX_SITES");
  FILE* list = path ? fopen(path, "r") : NULL;
  if (!list) give_up("AMX emulator: the list of places");
  unsigned long offset;
  while (fscanf(list, "%lx", &offset) == 1) overwrite((uint8_t*)library->l_addr + offset);
  fclose(list);
  return 0;
}
