// Emulates AMX in a process whose CPU lacks it, instruction by instruction.
//
// Preloaded (LD_PRELOAD). Without AMX a tile instruction is illegal, so the kernel sends SIGILL;
// the handler executes the instruction and continues after it. oneDNN detects tiles because overwrite.c
// redirects its `cpuid` instructions to this handler, too. Other features are the CPU's own. Counts
// of executed instructions are added to the file TILEFORGE_AMX_COUNTS when the process ends.
//
// Semantics: Intel's Software Developer's Manual, volume 1 chapter 18 and volume 2; the sizes of
// palette 1 are from Sapphire Rapids' CPUID leaves.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kTiles = 8, kRows = 16, kRowBytes = 64, kConfigBytes = 64 };
enum { kAmxBf16 = 1 << 22, kAvx512Fp16 = 1 << 23, kAmxTile = 1 << 24, kAmxInt8 = 1 << 25 };
enum { kAvxVnni = 1 << 4 };
enum { kArchGetPermission = 0x1022, kArchRequestPermission = 0x1023, kTileData = 18 };

struct tiles {
  uint8_t palette;
  uint8_t rows[kTiles];
  uint16_t row_bytes[kTiles];
  _Alignas(64) uint8_t data[kTiles][kRows][kRowBytes];
};

// Per thread, allocated at its first use of tiles: with an auditing library, static thread-local
// memory has room for only a pointer, and a signal handler may not call malloc.
static _Thread_local struct tiles* tiles;

static struct {
  atomic_ulong configurations, releases, zeros, loads, stores, products, multiplications;
} counts;

static void give_up(const char* why, const uint8_t* at) {
  fprintf(stderr, "AMX emulator: %s; the instruction's bytes:", why);
  for (int i = 0; i < 12; ++i) fprintf(stderr, " %02x", at[i]);
  fputc('\n', stderr);
  abort();
}

// ---- CPUID

static void identify(uint32_t leaf, uint32_t part, uint32_t out[4]) {
  __cpuid_count(leaf, part, out[0], out[1], out[2], out[3]);
  switch (leaf) {
    case 0:
      if (out[0] < 0x1e) out[0] = 0x1e;
      break;
    case 7:  // oneDNN uses tiles only together with AVX512-FP16 and AVX-VNNI
      if (part == 0) out[3] |= kAmxBf16 | kAvx512Fp16 | kAmxTile | kAmxInt8;
      if (part == 1) out[0] |= kAvxVnni;
      break;
    case 0xd:
      if (part == 0) out[0] |= 3u << 17;
      break;
    case 0x1d:
      memset(out, 0, 4 * sizeof(*out));
      if (part == 0) out[0] = 1;
      if (part == 1) {
        out[0] = kTiles * kRows * kRowBytes | (kRows * kRowBytes) << 16;
        out[1] = kRowBytes | kTiles << 16;
        out[2] = kRows;
      }
      break;
    case 0x1e:
      memset(out, 0, 4 * sizeof(*out));
      if (part == 0) out[1] = kRows | kRowBytes << 8;
      break;
    default:
      if (leaf > 0x10 && leaf < 0x1d) memset(out, 0, 4 * sizeof(*out));
  }
}

static void enabled_states(greg_t* registers) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(registers[REG_RCX]));
  if (registers[REG_RCX] == 0) low |= 3u << 17;
  registers[REG_RAX] = low;
  registers[REG_RDX] = high;
}

// ---- tile instructions

static const int kRegister[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};

struct operand {
  int reg, rm;  // rm: of a register operand; otherwise -1
  uint8_t* address;
  int64_t stride;  // the scaled index register: for tile loads and stores, bytes between rows
  const uint8_t* end;
};

static struct operand decode(const uint8_t* vex, const greg_t* registers) {
  const int r = !(vex[1] & 0x80), x = !(vex[1] & 0x40), b = !(vex[1] & 0x20);
  const uint8_t modrm = vex[4];
  const int mod = modrm >> 6, rm = modrm & 7;
  struct operand o = {.reg = (modrm >> 3 & 7) | r << 3, .rm = -1, .end = vex + 5};
  if (mod == 3) {
    o.rm = rm | b << 3;
    return o;
  }
  int64_t base = 0;
  int has_base = 1, number = rm | b << 3;
  if (rm == 4) {
    const uint8_t sib = *o.end++;
    const int index = (sib >> 3 & 7) | x << 3;
    if (index != 4) o.stride = registers[kRegister[index]] << (sib >> 6);
    number = (sib & 7) | b << 3;
    has_base = !((sib & 7) == 5 && mod == 0);
  } else if (rm == 5 && mod == 0) {
    give_up("an address relative to the instruction is not decoded", vex);
  }
  if (has_base) base = registers[kRegister[number]];
  if (mod == 1) {
    base += (int8_t)*o.end;
    o.end += 1;
  } else if (mod == 2 || !has_base) {
    int32_t displacement;
    memcpy(&displacement, o.end, sizeof(displacement));
    base += displacement;
    o.end += sizeof(displacement);
  }
  o.address = (uint8_t*)base;
  return o;
}

static void configure(const uint8_t* from, const uint8_t* at) {
  memset(tiles, 0, sizeof(*tiles));
  if (from[0] == 0) return;
  if (from[0] != 1) give_up("no such palette", at);
  if (from[1] != 0) give_up("a row to start at is not done here", at);
  for (int i = 2; i < 16; ++i) {
    if (from[i]) give_up("not a valid configuration of tiles", at);
  }
  for (int tile = 0; tile < 16; ++tile) {
    uint16_t row_bytes;
    memcpy(&row_bytes, from + 16 + 2 * tile, sizeof(row_bytes));
    const uint8_t rows = from[48 + tile];
    if (tile < kTiles ? rows > kRows || row_bytes > kRowBytes || !rows != !row_bytes
                      : rows || row_bytes) {
      give_up("not a valid configuration of tiles", at);
    }
    if (tile < kTiles) tiles->rows[tile] = rows, tiles->row_bytes[tile] = row_bytes;
  }
  tiles->palette = 1;
}

static void read_configuration(uint8_t* to) {
  memset(to, 0, kConfigBytes);
  to[0] = tiles->palette;
  for (int tile = 0; tile < kTiles; ++tile) {
    memcpy(to + 16 + 2 * tile, &tiles->row_bytes[tile], sizeof(uint16_t));
    to[48 + tile] = tiles->rows[tile];
  }
}

static void check_tile(int tile, const uint8_t* at) {
  if (tile < 0 || tile >= kTiles || !tiles->palette || !tiles->rows[tile]) {
    give_up("a tile that is not configured", at);
  }
}

static void load(int tile, const struct operand* from) {
  memset(tiles->data[tile], 0, sizeof(tiles->data[tile]));
  for (int row = 0; row < tiles->rows[tile]; ++row) {
    memcpy(tiles->data[tile][row], from->address + row * from->stride, tiles->row_bytes[tile]);
  }
}

static void store(int tile, const struct operand* to) {
  for (int row = 0; row < tiles->rows[tile]; ++row) {
    memcpy(to->address + row * to->stride, tiles->data[tile][row], tiles->row_bytes[tile]);
  }
}

static float widen(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// sums (m x n) += left (m x 2k) times right (k x n pairs): products of even and of odd elements are
// summed separately, as in the manual's pseudocode. Hardware also treats values below 1e-38 as
// zero; this function does not.
static void multiply(int sums, int left, int right, const uint8_t* at) {
  const int m = tiles->rows[sums], n = tiles->row_bytes[sums] / 4, k = tiles->row_bytes[left] / 4;
  if (sums == left || sums == right || left == right) give_up("a product with a tile twice", at);
  if (tiles->row_bytes[left] != 4 * k || tiles->row_bytes[sums] != 4 * n ||
      tiles->rows[left] != m || tiles->row_bytes[right] != 4 * n || tiles->rows[right] != k) {
    give_up("tiles of a product do not fit each other", at);
  }
  for (int row = 0; row < m; ++row) {
    float even[kRows] = {0}, odd[kRows] = {0}, sum[kRows];
    const uint16_t* factors = (const uint16_t*)tiles->data[left][row];
    for (int pair = 0; pair < k; ++pair) {
      const uint16_t* others = (const uint16_t*)tiles->data[right][pair];
      const float first = widen(factors[2 * pair]), second = widen(factors[2 * pair + 1]);
      for (int column = 0; column < kRows; ++column) {
        even[column] += first * widen(others[2 * column]);
        odd[column] += second * widen(others[2 * column + 1]);
      }
    }
    memcpy(sum, tiles->data[sums][row], sizeof(sum));
    for (int column = 0; column < n; ++column) sum[column] += even[column] + odd[column];
    memcpy(tiles->data[sums][row], sum, sizeof(sum));
  }
  counts.products++;
  counts.multiplications += (unsigned long)m * n * k * 2;
}

// Executes the tile instruction at `vex` and returns its end; NULL for any other instruction.
static const uint8_t* execute(const uint8_t* vex, const greg_t* registers) {
  if (vex[0] != 0xc4) return NULL;
  const int map = vex[1] & 0x1f, prefix = vex[2] & 3;
  if (map != 2 || vex[2] & 0x84) return NULL;  // 0F38, W0, 128 bits
  enum { kNone, k66, kF3, kF2 };
  const uint8_t opcode = vex[3];
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c) return NULL;
  const struct operand o = decode(vex, registers);
  if (opcode == 0x4b && (o.rm >= 0 || (vex[4] & 7) != 4)) give_up("no such address of a tile", vex);
  if (!tiles) {
    tiles = mmap(NULL, sizeof(*tiles), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (tiles == MAP_FAILED) give_up("no memory for tiles", vex);
  }
  if (opcode == 0x49 && prefix == kNone && o.rm < 0) {
    configure(o.address + o.stride, vex);
    counts.configurations++;
  } else if (opcode == 0x49 && prefix == kNone) {
    memset(tiles, 0, sizeof(*tiles));
    counts.releases++;
  } else if (opcode == 0x49 && prefix == k66) {
    read_configuration(o.address + o.stride);
  } else if (opcode == 0x49 && prefix == kF2) {
    check_tile(o.reg, vex);
    memset(tiles->data[o.reg], 0, sizeof(tiles->data[o.reg]));
    counts.zeros++;
  } else if (opcode == 0x4b && (prefix == kF2 || prefix == k66)) {  // 66: a hint to read it once
    check_tile(o.reg, vex);
    load(o.reg, &o);
    counts.loads++;
  } else if (opcode == 0x4b && prefix == kF3) {
    check_tile(o.reg, vex);
    store(o.reg, &o);
    counts.stores++;
  } else if (opcode == 0x5c && prefix == kF3) {
    const int right = ~vex[2] >> 3 & 15;
    check_tile(o.reg, vex);
    check_tile(o.rm, vex);
    check_tile(right, vex);
    multiply(o.reg, o.rm, right, vex);
  } else {
    return NULL;
  }
  return o.end;
}

static void on_illegal_instruction(int signal_number, siginfo_t* info, void* context) {
  (void)signal_number, (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* at = (const uint8_t*)registers[REG_RIP];
  const uint8_t* end;
  if (at[0] == 0x0f && at[1] == 0xff) {  // replaced `cpuid`
    uint32_t out[4];
    identify((uint32_t)registers[REG_RAX], (uint32_t)registers[REG_RCX], out);
    registers[REG_RAX] = out[0], registers[REG_RBX] = out[1];
    registers[REG_RCX] = out[2], registers[REG_RDX] = out[3];
    end = at + 2;
  } else if (at[0] == 0x0f && at[1] == 0x0b && at[2] == 0xd0) {  // replaced `xgetbv`
    enabled_states(registers);
    end = at + 3;
  } else {
    end = execute(at, registers);
    if (!end) give_up("an illegal instruction that is not of tiles, or not done here", at);
    // Tile instructions follow each other, and a signal takes longer than one instruction.
    for (const uint8_t* next = end; (next = execute(next, registers));) end = next;
  }
  registers[REG_RIP] = (greg_t)end;
}

// ---- Overridden functions

// The request to use tiles, which this machine's kernel cannot grant.
long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_arch_prctl && a[0] == kArchRequestPermission && a[1] == kTileData) return 0;
  if (number == SYS_arch_prctl && a[0] == kArchGetPermission) {
    *(unsigned long*)a[1] |= 3ul << 17;
    return 0;
  }
  register long r10 __asm__("r10") = a[3], r8 __asm__("r8") = a[4], r9 __asm__("r9") = a[5];
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = (int)-result;
    return -1;
  }
  return result;
}

// Python's faulthandler, which pytest enables, would replace the signal handler.
int sigaction(int number, const struct sigaction* action, struct sigaction* old) {
  typedef int set_action(int, const struct sigaction*, struct sigaction*);
  static set_action* real;
  if (!real) real = (set_action*)dlsym(RTLD_NEXT, "sigaction");
  const int ours = action && action->sa_flags & SA_SIGINFO &&
                   action->sa_sigaction == on_illegal_instruction;
  return real(number, number == SIGILL && !ours ? NULL : action, old);
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action = {.sa_sigaction = on_illegal_instruction,
                             .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, NULL);
}

__attribute__((destructor)) static void write_counts(void) {
  const char* path = getenv("TILEFORGE_AMX_COUNTS");
  if (!path || !counts.configurations) return;
  char line[512];
  const int length = snprintf(
      line, sizeof(line),
      "{\"configurations\": %lu, \"releases\": %lu, \"zeros\": %lu, \"loads\": %lu, "
      "\"stores\": %lu, \"products\": %lu, \"multiplications\": %lu}\n",
      counts.configurations, counts.releases, counts.zeros, counts.loads, counts.stores,
      counts.products, counts.multiplications);
  const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0 || write(file, line, length) != length) perror("AMX emulator: the counts");
  if (file >= 0) close(file);
}
