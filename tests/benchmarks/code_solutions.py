"""Solutions of the tasks in benchmarks/code_tasks.jsonl, one function each."""

from __future__ import annotations


def is_palindrome(text: str) -> bool:
    kept = [c.lower() for c in text if c.isalnum()]
    return kept == kept[::-1]


def count_vowels(text: str) -> int:
    return sum(c in "aeiou" for c in text.lower())


def run_lengths(text: str) -> list[tuple[str, int]]:
    runs = []
    for c in text:
        if runs and runs[-1][0] == c:
            runs[-1] = (c, runs[-1][1] + 1)
        else:
            runs.append((c, 1))
    return runs


def caesar(text: str, shift: int) -> str:
    out = []
    for c in text:
        if c.isascii() and c.isalpha():
            first = ord("a" if c.islower() else "A")
            c = chr((ord(c) - first + shift) % 26 + first)
        out.append(c)
    return "".join(out)


def word_counts(text: str) -> dict[str, int]:
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def longest_common_prefix(words: list[str]) -> str:
    if not words:
        return ""
    first, last = min(words), max(words)
    size = 0
    while size < min(len(first), len(last)) and first[size] == last[size]:
        size += 1
    return first[:size]


def are_anagrams(first: str, second: str) -> bool:
    return sorted(first.lower().replace(" ", "")) == sorted(second.lower().replace(" ", ""))


def title_case(text: str) -> str:
    return " ".join(word[:1].upper() + word[1:].lower() for word in text.split(" "))


def first_unique(text: str) -> int:
    for index, c in enumerate(text):
        if text.count(c) == 1:
            return index
    return -1


def to_snake_case(name: str) -> str:
    out = ""
    for index, c in enumerate(name):
        out += ("_" if c.isupper() and index else "") + c.lower()
    return out


def balanced(text: str) -> bool:
    open_of, stack = {")": "(", "]": "[", "}": "{"}, []
    for c in text:
        if c in "([{":
            stack.append(c)
        elif c in open_of and (not stack or stack.pop() != open_of[c]):
            return False
    return not stack


def reverse_words(text: str) -> str:
    return " ".join(reversed(text.split()))


def roman(number: int) -> str:
    pairs = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")]
    pairs += [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    out = ""
    for value, letters in pairs:
        while number >= value:
            out, number = out + letters, number - value
    return out


def from_roman(numeral: str) -> int:
    value = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for c, after in zip(numeral, numeral[1:] + "I"):
        total += value[c] if value[c] >= value[after] else -value[c]
    return total


def digit_sum(number: int) -> int:
    return sum(map(int, str(abs(number))))


def is_prime(number: int) -> bool:
    return number > 1 and all(number % n for n in range(2, int(number**0.5) + 1))


def prime_factors(number: int) -> list[int]:
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found + ([number] if number > 1 else [])


def gcd(first: int, second: int) -> int:
    while second:
        first, second = second, first % second
    return first


def fibonacci(count: int) -> list[int]:
    found, first, second = [], 0, 1
    for _ in range(count):
        found.append(first)
        first, second = second, first + second
    return found


def collatz_steps(number: int) -> int:
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def to_base(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = "0123456789abcdef"[digit] + digits
    return digits or "0"


def perfect_numbers(limit: int) -> list[int]:
    return [n for n in range(2, limit) if sum(d for d in range(1, n) if n % d == 0) == n]


def armstrong(number: int) -> bool:
    digits = str(number)
    return sum(int(d) ** len(digits) for d in digits) == number


def integer_root(number: int) -> int:
    import math

    return math.isqrt(number)


def binomial(n: int, k: int) -> int:
    if not 0 <= k <= n:
        return 0
    found = 1
    for i in range(k):
        found = found * (n - i) // (i + 1)
    return found


def is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_between(first: str, second: str) -> int:
    from datetime import date

    return (date.fromisoformat(second) - date.fromisoformat(first)).days


def format_seconds(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def flatten(values: list) -> list:
    found = []
    for value in values:
        found += flatten(value) if isinstance(value, list) else [value]
    return found


def chunks(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def unique(values: list) -> list:
    return list(dict.fromkeys(values))


def rotate(values: list, steps: int) -> list:
    if not values:
        return []
    steps %= len(values)
    return values[-steps:] + values[:-steps] if steps else list(values)


def two_sum(numbers: list[int], target: int) -> tuple[int, int] | None:
    seen = {}
    for j, number in enumerate(numbers):
        if target - number in seen:
            return seen[target - number], j
        seen.setdefault(number, j)
    return None


def max_subarray(numbers: list[int]) -> int:
    best = here = numbers[0]
    for number in numbers[1:]:
        here = max(number, here + number)
        best = max(best, here)
    return best


def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    return sorted(first + second)


def binary_search(numbers: list[int], wanted: int) -> int:
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(numbers) and numbers[low] == wanted else -1


def second_largest(numbers: list[int]) -> int | None:
    ordered = sorted(set(numbers))
    return ordered[-2] if len(ordered) > 1 else None


def median(numbers: list[float]) -> float:
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def mode(values: list[int]) -> int:
    return min(set(values), key=lambda value: (-values.count(value), value))


def running_sums(numbers: list[int]) -> list[int]:
    from itertools import accumulate

    return list(accumulate(numbers))


def missing_number(numbers: list[int]) -> int:
    return sum(range(len(numbers) + 1)) - sum(numbers)


def move_zeros(numbers: list[int]) -> list[int]:
    kept = [n for n in numbers if n != 0]
    return kept + [0] * (len(numbers) - len(kept))


def transpose(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows)]


def multiply(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    return [[sum(a * b for a, b in zip(row, column)) for column in zip(*second)] for row in first]


def spiral(rows: list[list[int]]) -> list[int]:
    found, rows = [], [list(row) for row in rows]
    while rows:
        found += rows[0]
        rows = [list(row) for row in zip(*rows[1:])][::-1]
    return found


def pascal(rows: int) -> list[list[int]]:
    from itertools import pairwise

    found = []
    for n in range(rows):
        above = found[-1] if found else []
        found.append([1] + [a + b for a, b in pairwise(above)] + ([1] if n else []))
    return found


def group_by_length(words: list[str]) -> dict[int, list[str]]:
    groups = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    return groups


def invert(mapping: dict[str, int]) -> dict[int, list[str]]:
    found = {}
    for key in sorted(mapping):
        found.setdefault(mapping[key], []).append(key)
    return found


def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def permutations(text: str) -> list[str]:
    if not text:
        return [""]
    return sorted({c + rest for i, c in enumerate(text) for rest in permutations(text[:i] + text[i + 1 :])})


def subsets(values: list[int]) -> list[list[int]]:
    from itertools import combinations

    return [list(each) for size in range(len(values) + 1) for each in combinations(sorted(values), size)]


def coin_change(coins: list[int], amount: int) -> int:
    fewest = [0] + [amount + 1] * amount
    for total in range(1, amount + 1):
        for coin in coins:
            if coin <= total:
                fewest[total] = min(fewest[total], fewest[total - coin] + 1)
    return fewest[amount] if fewest[amount] <= amount else -1


def edit_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        before, row = row, [i]
        for j, b in enumerate(second, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


def longest_increasing(numbers: list[int]) -> int:
    best = []
    for i, number in enumerate(numbers):
        best.append(1 + max((best[j] for j in range(i) if numbers[j] < number), default=0))
    return max(best, default=0)


def longest_unique(text: str) -> int:
    begin, best, last = 0, 0, {}
    for index, c in enumerate(text):
        begin = max(begin, last.get(c, -1) + 1)
        last[c] = index
        best = max(best, index - begin + 1)
    return best


def climb(steps: int) -> int:
    first, second = 1, 1
    for _ in range(steps):
        first, second = second, first + second
    return first


def islands(rows: list[str]) -> int:
    land = {(r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell == "#"}
    count = 0
    while land:
        count, todo = count + 1, [land.pop()]
        while todo:
            r, c = todo.pop()
            for near in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                if near in land:
                    land.remove(near)
                    todo.append(near)
    return count


def shortest_path(edges: dict[str, list[str]], start: str, end: str) -> int:
    distance, queue = {start: 0}, [start]
    for node in queue:
        for near in edges.get(node, []):
            if near not in distance:
                distance[near] = distance[node] + 1
                queue.append(near)
    return distance.get(end, -1)


def evaluate(expression: str) -> int:
    stack = []
    for word in expression.split():
        if word in ("+", "-", "*"):
            b, a = stack.pop(), stack.pop()
            stack.append(a + b if word == "+" else a - b if word == "-" else a * b)
        else:
            stack.append(int(word))
    return stack[0]


def parse_query(query: str) -> dict[str, str]:
    found = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        found[name] = value
    return found
